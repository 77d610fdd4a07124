//! Re-entrancy: which workers' graphs the current thread is building (design rule 21).
//!
//! The check comes before any lock and before the backend: a nested submission would wait for itself.

use std::cell::RefCell;

use crate::error::Error;

thread_local! {
    static BUILDING: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Marks the current thread as building a graph of `worker` for as long as the value lives.
#[derive(Debug)]
pub(crate) struct Building {
    worker: u64,
}

impl Building {
    pub(crate) fn enter(worker: u64) -> Self {
        // Fails only in a destructor of a thread that is ending: what it builds then is not noted.
        let _ending = BUILDING.try_with(|stack| stack.borrow_mut().push(worker));
        Self { worker }
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        let _ending = BUILDING.try_with(|stack| {
            let mut stack = stack.borrow_mut();
            if let Some(at) = stack.iter().rposition(|w| *w == self.worker) {
                stack.remove(at);
            }
        });
    }
}

/// Whether the current thread is building a graph of `worker`. A thread that is ending and has lost its thread-locals
/// builds nothing: buffers and workers that outlive them there are let go like anywhere else.
pub(crate) fn is_building(worker: u64) -> bool {
    BUILDING.try_with(|stack| stack.borrow().contains(&worker)).unwrap_or(false)
}

/// Refuses `call` inside a graph builder of `worker`.
pub(crate) fn refuse(worker: u64, call: &'static str) -> Result<(), Error> {
    if is_building(worker) { Err(Error::Reentrant { call }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_worker_on_the_same_thread_is_refused() {
        let outer = Building::enter(1);
        let inner = Building::enter(2);
        assert!(refuse(1, "submit").is_err() && refuse(2, "submit").is_err() && refuse(3, "submit").is_ok());
        std::thread::scope(|s| {
            s.spawn(|| assert!(refuse(1, "submit").is_ok())).join().unwrap();
        });
        drop(inner);
        assert!(refuse(2, "submit").is_ok() && refuse(1, "submit").is_err());
        drop(outer);
        assert!(refuse(1, "submit").is_ok());
    }
}
