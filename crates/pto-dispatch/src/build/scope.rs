//! Nested scopes: the builder's own code inside a call of the backend.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use pto_simpler_sys::{BackendError, BuildFailed, Call, CallbackError};

use super::Build;
use crate::error::Error;
use crate::inner::panic_text;

impl<'b> Build<'b> {
    /// Runs `body` in a nested scope: tasks submitted in it reclaim their intermediates independently. Does not
    /// open the dispatch by itself.
    ///
    /// # Errors
    ///
    /// What `body` returns; [`Error::Backend`] where the scope cannot be opened (too deep) or closed.
    ///
    /// # Panics
    ///
    /// Only where `body` does: its panic is resumed after the backend has closed the scope.
    pub fn scope<T, E: From<Error>>(&self, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.check_sticky()?;
        let mut body = Some(body);
        let mut result = None;
        crate::sync::assert_unlocked("scope");
        let scoped = catch_unwind(AssertUnwindSafe(|| {
            self.orchestrator.scope(&mut || {
                let Some(body) = body.take() else { return Err(BuildFailed) };
                let outcome = catch_unwind(AssertUnwindSafe(body));
                let failed = !matches!(outcome, Ok(Ok(_)));
                result = Some(outcome);
                if failed { Err(BuildFailed) } else { Ok(()) }
            })
        }));
        // A failure of the backend's own counts whatever became of the body.
        let scoped = match scoped {
            Ok(Err(CallbackError::Backend(error))) => Err(self.failed(error)),
            Err(payload) => {
                let text = format!("the backend panicked: {}", panic_text(&*payload));
                Err(self.failed(BackendError::broken(Call::Scope, text)))
            }
            Ok(Ok(())) => Ok(Ok(())),
            Ok(Err(CallbackError::Build(failed))) => Ok(Err(failed)),
        };
        match result {
            Some(Err(payload)) => resume_unwind(payload),
            Some(Ok(Err(error))) => return Err(error),
            Some(Ok(Ok(_))) | None => {}
        }
        match scoped {
            Ok(Ok(())) => {}
            Err(error) => return Err(error.into()),
            Ok(Err(BuildFailed)) => {
                return Err(self
                    .stick(Error::broken("the backend reports a failed scope whose body did not fail"))
                    .into());
            }
        }
        match result {
            Some(Ok(Ok(value))) => Ok(value),
            _ => Err(self.stick(Error::broken("the backend opened a scope without running its body")).into()),
        }
    }
}
