//! Copies that the builder asks for, between host buffers and device memory.

use pto_simpler_sys::{Call, CopySource, CopyTo, DevicePlace, TensorPlace};

use super::{Build, Place};
use crate::buffer::HostBuffer;
use crate::error::Error;

impl<'b> Build<'b> {
    /// Copies all of `src` to the start of `dst`, synchronously. *Control*: before the first task only.
    ///
    /// # Errors
    ///
    /// [`Error::Build`]: after a task, `dst` is not device memory, or it is smaller than `src` (nothing was done).
    /// [`Error::WouldBlock`] under `try_submit`. [`Error::Backend`]: the backend failed.
    pub fn copy_to<'a>(&self, dst: impl Into<Place<'a, 'b>>, src: &HostBuffer) -> Result<(), Error>
    where
        'b: 'a,
    {
        let dst = self.control_place(dst.into(), src.nbytes())?;
        self.check_owner(src.worker())?;
        self.keep_host(src);
        self.open()?;
        let copy = CopyTo { dst, src: CopySource::Host(src.id()), nbytes: src.nbytes() };
        self.effect(Call::CopyTo, || self.orchestrator.copy_to(&copy))
    }

    /// Copies from the start of `src` into all of `dst`, synchronously. *Control*: before the first task only.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to).
    pub fn copy_from<'a>(&self, dst: &HostBuffer, src: impl Into<Place<'a, 'b>>) -> Result<(), Error>
    where
        'b: 'a,
    {
        let src = self.control_place(src.into(), dst.nbytes())?;
        self.check_owner(dst.worker())?;
        self.keep_host(dst);
        self.open()?;
        self.effect(Call::CopyFrom, || self.orchestrator.copy_from(dst.id(), src, dst.nbytes()))
    }

    /// The device side of a copy of `nbytes` bytes. What can be known to go wrong is refused before the opening.
    fn control_place(&self, place: Place<'_, 'b>, nbytes: u64) -> Result<DevicePlace, Error> {
        self.check_sticky()?;
        if self.state.tasks.get() {
            return Err(Error::build("copies come before the first task of a dispatch: copy earlier"));
        }
        self.check_poison()?;
        self.check_control()?;
        let located = self.place(place)?;
        let place = match located.place {
            TensorPlace::DomainBuffer { domain, chip, buffer } => {
                DevicePlace::DomainBuffer { domain, chip, buffer }
            }
            TensorPlace::Resident(id) => DevicePlace::Resident(id),
            TensorPlace::Host(_) | TensorPlace::Scratch(_) => {
                return Err(Error::build("the device side of a copy is a leased buffer or a device tensor"));
            }
        };
        if nbytes > located.nbytes {
            return Err(Error::build(format!(
                "a host buffer of {nbytes} bytes is copied as a whole, and the device side has {} bytes: copy with a \
                 smaller one",
                located.nbytes
            )));
        }
        Ok(place)
    }
}
