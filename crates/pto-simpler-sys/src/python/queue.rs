//! A closable queue whose receiving end can be waited on detached from the interpreter.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

#[derive(Debug)]
pub(crate) struct Queue<T> {
    items: Mutex<(VecDeque<T>, bool)>,
    changed: Condvar,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { items: Mutex::new((VecDeque::new(), false)), changed: Condvar::new() }
    }
}

impl<T> Queue<T> {
    /// Appends an item, or gives it back where the queue is closed.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        let mut items = self.items.lock();
        if items.1 {
            return Err(item);
        }
        items.0.push_back(item);
        self.changed.notify_all();
        Ok(())
    }

    /// The next item; `None` once the queue is closed and empty. Blocks.
    pub(crate) fn pop(&self) -> Option<T> {
        let mut items = self.items.lock();
        loop {
            if let Some(item) = items.0.pop_front() {
                return Some(item);
            }
            if items.1 {
                return None;
            }
            self.changed.wait(&mut items);
        }
    }

    /// Takes no more items; those inside are still given out.
    pub(crate) fn close(&self) {
        self.items.lock().1 = true;
        self.changed.notify_all();
    }
}
