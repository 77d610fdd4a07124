//! The domains that a worker has given out: Python handles, what they look like, and where they are in their lives.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;

use super::table::Table;
use super::views::{View, Views};
use crate::allocation::{BufferWindow, DomainAllocation, DomainState, MemberWindow};
use crate::error::BackendError;
use crate::ids::{ChipId, DomainId, RunId};
use crate::request::DomainRequest;

/// One physical domain.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) name: Arc<str>,
    /// The run that allocated it.
    pub(crate) owner: RunId,
    pub(crate) request: DomainRequest,
    pub(crate) handle: Py<PyAny>,
    /// Live or released; a freed domain is no longer in the table.
    pub(crate) released: bool,
    /// The outcome of its release, once there is one; or a release is going on.
    pub(crate) release: Release,
    /// It must go: a run that was registered with it has failed (legacy retention), or somebody released it while
    /// runs were registered with it. The end of the last of those runs releases it.
    pub(crate) doomed: bool,
    members: Vec<MemberWindow>,
    /// Rank-major, in declaration order.
    buffers: Vec<(BufferWindow, Views)>,
}

/// How far somebody's release of a domain is.
#[derive(Clone, Debug)]
pub(crate) enum Release {
    No,
    Going,
    /// Over; freed now, or in the cleanup of its run.
    Done,
    Failed(BackendError),
}

impl Domain {
    /// Reads a handle that the runtime has just returned.
    pub(crate) fn read(
        py: Python<'_>,
        owner: RunId,
        name: &str,
        request: &DomainRequest,
        handle: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let mut members = Vec::with_capacity(request.workers.len());
        let mut buffers = Vec::with_capacity(request.workers.len() * request.buffers.len());
        for chip in &request.workers {
            let context = handle.get_item(chip.0)?;
            members.push(MemberWindow {
                chip: *chip,
                rank: context.getattr(intern!(py, "domain_rank"))?.extract()?,
                device_context: context.getattr(intern!(py, "device_ctx"))?.extract()?,
                base: context.getattr(intern!(py, "local_window_base"))?.extract()?,
                mapped_bytes: context.getattr(intern!(py, "actual_window_size"))?.extract()?,
            });
            let named = context.getattr(intern!(py, "buffers"))?;
            for buffer in &request.buffers {
                let object = named.get_item(&*buffer.name)?;
                let window = BufferWindow {
                    address: object.getattr(intern!(py, "base"))?.extract()?,
                    nbytes: object.getattr(intern!(py, "nbytes"))?.extract()?,
                };
                buffers.push((window, Views::new(object.unbind())));
            }
        }
        Ok(Self {
            name: name.into(),
            owner,
            request: request.clone(),
            handle: handle.clone().unbind(),
            released: false,
            release: Release::No,
            doomed: false,
            members,
            buffers,
        })
    }

    pub(crate) fn describe(&self, id: DomainId, reply: &mut DomainAllocation) {
        let per_member = self.request.buffers.len();
        reply.begin(id, per_member);
        for (rank, member) in self.members.iter().enumerate() {
            let windows = self.buffers.iter().skip(rank * per_member).take(per_member).map(|(w, _)| *w);
            reply.push_member(*member, windows);
        }
    }

    /// A named buffer on one member.
    fn buffer(&self, chip: ChipId, index: u32) -> Option<&(BufferWindow, Views)> {
        let rank = self.request.rank_of(chip)?;
        let index = usize::try_from(index).ok().filter(|i| *i < self.request.buffers.len())?;
        self.buffers.get(rank * self.request.buffers.len() + index)
    }

    pub(crate) fn view(&self, py: Python<'_>, chip: ChipId, index: u32) -> Option<View> {
        self.buffer(chip, index).map(|(window, views)| views.view(py, window.nbytes))
    }

    pub(crate) fn views_mut(&mut self, chip: ChipId, index: u32) -> Option<&mut Views> {
        let rank = self.request.rank_of(chip)?;
        let index = usize::try_from(index).ok().filter(|i| *i < self.request.buffers.len())?;
        self.buffers.get_mut(rank * self.request.buffers.len() + index).map(|(_, views)| views)
    }

    /// Bytes mapped on one chip.
    pub(crate) fn mapped_on(&self, chip: ChipId) -> u64 {
        self.members.iter().filter(|m| m.chip == chip).fold(0, |sum, m| sum.saturating_add(m.mapped_bytes))
    }
}

/// All domains of a worker.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    pub(crate) table: Table<Domain>,
    /// Live domains by name.
    pub(crate) names: BTreeMap<Arc<str>, DomainId>,
}

impl Domains {
    pub(crate) fn add(&mut self, domain: Domain) -> DomainId {
        let name = Arc::clone(&domain.name);
        let id = self.table.add(domain);
        self.names.insert(name, id);
        id
    }

    /// The name may be used again, the memory may still be there.
    pub(crate) fn released(&mut self, id: DomainId) {
        if let Some(domain) = self.table.at_mut(id) {
            domain.released = true;
            let name = Arc::clone(&domain.name);
            self.unname(&name, id);
        }
    }

    /// The memory is gone. Returns the domain, to be dropped outside the lock.
    pub(crate) fn freed(&mut self, id: DomainId) -> Option<Domain> {
        let domain = self.table.take(id)?;
        self.unname(&domain.name, id);
        Some(domain)
    }

    fn unname(&mut self, name: &Arc<str>, id: DomainId) {
        if self.names.get(name) == Some(&id) {
            self.names.remove(name);
        }
    }

    pub(crate) fn state(&self, id: DomainId) -> Option<DomainState> {
        match self.table.at(id) {
            Some(domain) if domain.released => Some(DomainState::Released),
            Some(_) => Some(DomainState::Live),
            None => self.table.was(id).then_some(DomainState::Freed),
        }
    }
}
