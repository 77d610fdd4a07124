//! Leases: domains that are retained, or allocated for this dispatch (design rules 8, 9 and 12).

use std::sync::Arc;

use pto_domain::{DomainError, DomainKey, DomainName, Lease, LeaseParts, check_name, check_request, difference};
use pto_reset::check_mapping;
use pto_simpler_sys::{Call, DomainAllocation, DomainRequest};

use super::Build;
use crate::error::Error;
use crate::inner::Storage;

impl<'b> Build<'b> {
    /// Leases the domain `name`. In persistent mode the first use allocates it and later dispatches lease the same
    /// physical domain; otherwise it is allocated for this dispatch. Asking again in the same dispatch returns the
    /// same lease.
    ///
    /// # Errors
    ///
    /// [`Error::Request`]: the request is invalid (nothing was done). [`Error::Domain`]: retained under another
    /// request, with the difference; closing. [`Error::Poisoned`]: an older dispatch has failed meanwhile.
    /// [`Error::Build`]: not retained yet and a task was submitted already. [`Error::WouldBlock`] under `try_submit`. [`Error::Reset`]: a mapping is smaller than the request.
    /// [`Error::Backend`]: the backend failed.
    pub fn lease(&self, name: &str, request: &DomainRequest) -> Result<Lease<'b>, Error> {
        self.check_sticky()?;
        if self.inner.mode.persistent {
            self.lease_retained(name, request)
        } else {
            self.lease_ordinary(name, request)
        }
    }

    fn lease_retained(&self, name: &str, request: &DomainRequest) -> Result<Lease<'b>, Error> {
        let inner = self.inner;
        let found = {
            let table = inner.table.lock();
            let slot = table.lookup(self.program.index, name, request);
            slot.and_then(|slot| slot.map(|slot| Ok((slot, table.lease(slot, &inner.authority)?))).transpose())
        };
        let found = found.map_err(|error| self.not_leased(error))?;
        if let Some((slot, lease)) = found {
            self.note_leased(slot);
            return Ok(lease);
        }
        self.check_new_domain(name, request)?;
        self.open()?;
        let key = DomainKey::new(self.program.index, DomainName::new(name));
        let backend_name = key.to_string();
        let mut storage = self.state.storage.borrow_mut();
        let Storage { reply, allocated, .. } = &mut **storage;
        self.effect(Call::GetOrAllocateDomain, || {
            self.orchestrator.get_or_allocate_domain(&backend_name, request, true, reply)
        })?;
        *allocated += 1;
        self.check_new_mapping(&backend_name, request, reply)?;
        let inserted = {
            let mut table = inner.table.lock();
            let slot = table.insert(self.program.index, name, request, reply.clone());
            slot.and_then(|slot| Ok((slot, table.lease(slot, &inner.authority)?)))
        };
        let (slot, lease) = inserted.map_err(|error| self.stick(self.not_leased(error)))?;
        drop(storage);
        self.note_leased(slot);
        Ok(lease)
    }

    /// A worker that is poisoned while this graph is being built says what poisoned it, as to any submitter.
    fn not_leased(&self, error: DomainError) -> Error {
        match (&error, self.check_poison()) {
            (DomainError::Poisoned, Err(poisoned)) => poisoned,
            _ => error.into(),
        }
    }

    fn lease_ordinary(&self, name: &str, request: &DomainRequest) -> Result<Lease<'b>, Error> {
        let authority = &self.inner.authority;
        if let Some(parts) = self.state.ordinary.borrow().iter().find(|p| p.key.name().as_str() == name) {
            return match difference(&parts.request, request) {
                None => Ok(Lease::new(authority, parts.clone())),
                Some(difference) => Err(Error::build(format!(
                    "domain `{name}` was leased in this dispatch with another request: {difference}"
                ))),
            };
        }
        self.check_new_domain(name, request)?;
        self.open()?;
        let mut storage = self.state.storage.borrow_mut();
        let Storage { reply, allocated, .. } = &mut **storage;
        self.effect(Call::AllocateDomain, || self.orchestrator.allocate_domain(name, request, reply))?;
        *allocated += 1;
        self.check_new_mapping(name, request, reply)?;
        let Some(domain) = reply.id() else {
            return Err(self.stick(Error::broken("the backend's reply names no domain")));
        };
        let parts = LeaseParts {
            domain,
            key: DomainKey::new(self.program.index, DomainName::new(name)),
            epoch: 1,
            first_use: true,
            request: Arc::new(request.clone()),
            allocation: Arc::new(reply.clone()),
        };
        self.state.ordinary.borrow_mut().push(parts.clone());
        Ok(Lease::new(authority, parts))
    }

    fn check_new_domain(&self, name: &str, request: &DomainRequest) -> Result<(), Error> {
        let capabilities = &self.inner.capabilities;
        check_name(name)
            .and_then(|()| check_request(request, capabilities.chips(), capabilities.limits.ranks))
            .map_err(|source| Error::Request { name: name.into(), source })?;
        if self.state.tasks.get() {
            return Err(Error::build(format!(
                "domain `{name}` is not allocated yet and a task was submitted already: lease it before the first task"
            )));
        }
        self.check_control()
    }

    /// A mapping that is too small is unusable from the start (rule 14).
    fn check_new_mapping(&self, key: &str, request: &DomainRequest, reply: &DomainAllocation) -> Result<(), Error> {
        check_mapping(request, reply).map_err(|source| self.stick(Error::Reset { key: key.into(), source }))
    }

    fn note_leased(&self, slot: pto_domain::Slot) {
        let leased = &mut self.state.storage.borrow_mut().leased;
        if !leased.contains(&slot) {
            leased.push(slot);
        }
    }
}
