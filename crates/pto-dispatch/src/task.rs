//! Tasks of a graph build: arguments, checks before submission, submission.

use pto_simpler_sys::{Call, CallableKind, ChipId, TaskArgs};

use crate::build::{Build, GroupStorage, Tensor};
use crate::error::Error;
use crate::inner::Callable;

/// One task, to be given arguments and submitted. Dropping it submits nothing.
#[must_use = "a task that is not submitted does nothing"]
pub struct Task<'a, 'b> {
    build: &'a Build<'b>,
    callable: &'b Callable,
    args: TaskArgs,
    /// The chip that the arguments live on, as soon as one says so.
    chip: Result<Option<ChipId>, (ChipId, ChipId)>,
    /// The first argument that cannot be.
    wrong: Option<Error>,
}

impl<'a, 'b> Task<'a, 'b> {
    pub(crate) fn new(build: &'a Build<'b>, callable: &'b Callable) -> Result<Self, Error> {
        build.check_sticky()?;
        let mut args = build.state.storage.borrow_mut().task_args.pop().unwrap_or_default();
        args.clear();
        Ok(Self { build, callable, args, chip: Ok(None), wrong: None })
    }

    /// Adds a tensor.
    pub fn tensor(mut self, tensor: Tensor<'b>) -> Self {
        self.args.tensor(tensor.arg);
        note_chip(&mut self.chip, tensor.chip);
        if let Err(error) = tensor.check() {
            self.wrong.get_or_insert(error);
        }
        self
    }

    /// Adds a scalar.
    pub fn scalar(mut self, value: u64) -> Self {
        self.args.scalar(value);
        self
    }

    /// Submits the task to one chip worker. Opens the dispatch.
    ///
    /// # Errors
    ///
    /// [`Error::Build`]: the callable is not for chips, the arguments do not match its signature, exceed a limit, end
    /// beyond their memory or live on another chip (nothing was done). [`Error::Backend`]: the backend refused or
    /// failed.
    pub fn submit(mut self, chip: ChipId) -> Result<(), Error> {
        self.check_arguments()?;
        expect_kind(self.callable, CallableKind::Chip)?;
        check_args(self.build, self.callable, &self.args)?;
        check_chip(self.callable, self.chip, chip)?;
        check_worker(self.build, chip)?;
        self.build.open()?;
        self.build.state.tasks.set(true);
        self.build.effect(Call::SubmitNextLevel, || {
            self.build.orchestrator.submit_next_level(self.callable.id, &self.args, Some(self.build.config), chip)
        })
    }

    /// Submits the task to a host-side sub-worker. Opens the dispatch.
    ///
    /// # Errors
    ///
    /// As [`submit`](Self::submit); the callable must be one for sub-workers and its tensors host memory.
    pub fn submit_sub(mut self) -> Result<(), Error> {
        self.check_arguments()?;
        expect_kind(self.callable, CallableKind::Sub)?;
        check_args(self.build, self.callable, &self.args)?;
        if let Ok(None) = self.chip {
        } else {
            return Err(Error::build(format!(
                "sub-worker callable `{}` takes host memory only: copy device memory out first",
                self.callable.name
            )));
        }
        self.build.open()?;
        self.build.state.tasks.set(true);
        self.build.effect(Call::SubmitSub, || self.build.orchestrator.submit_sub(self.callable.id, &self.args))
    }

    fn check_arguments(&mut self) -> Result<(), Error> {
        self.wrong.take().map_or(Ok(()), Err)
    }
}

impl Drop for Task<'_, '_> {
    fn drop(&mut self) {
        let args = std::mem::take(&mut self.args);
        self.build.state.storage.borrow_mut().task_args.push(args);
    }
}

impl std::fmt::Debug for Task<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").field("callable", &self.callable.name).field("args", &self.args).finish()
    }
}

/// Tasks of one callable that start together, one on each chip. Dropping it submits nothing.
#[must_use = "a group that is not submitted does nothing"]
pub struct Group<'a, 'b> {
    build: &'a Build<'b>,
    callable: &'b Callable,
    storage: GroupStorage,
    members: usize,
    wrong: Option<Error>,
}

impl<'a, 'b> Group<'a, 'b> {
    pub(crate) fn new(build: &'a Build<'b>, callable: &'b Callable) -> Result<Self, Error> {
        build.check_sticky()?;
        let mut storage = build.state.storage.borrow_mut().groups.pop().unwrap_or_default();
        storage.workers.clear();
        Ok(Self { build, callable, storage, members: 0, wrong: None })
    }

    /// Begins the arguments of the next member, on `chip`.
    pub fn member(mut self, chip: ChipId) -> Self {
        self.storage.workers.push(chip);
        match self.storage.args.get_mut(self.members) {
            Some(args) => args.clear(),
            None => self.storage.args.push(TaskArgs::new()),
        }
        self.members += 1;
        self
    }

    /// Adds a tensor to the current member.
    pub fn tensor(mut self, tensor: Tensor<'b>) -> Self {
        match self.current() {
            Some((args, chip)) => {
                args.tensor(tensor.arg);
                if let Some(home) = tensor.chip
                    && home != chip
                {
                    self.complain(Error::build(format!("a tensor on {home} cannot be an argument on {chip}")));
                }
                if let Err(error) = tensor.check() {
                    self.complain(error);
                }
            }
            None => self.complain(Error::build("name the member before its arguments")),
        }
        self
    }

    /// Adds a scalar to the current member.
    pub fn scalar(mut self, value: u64) -> Self {
        match self.current() {
            Some((args, _)) => {
                args.scalar(value);
            }
            None => self.complain(Error::build("name the member before its arguments")),
        }
        self
    }

    fn current(&mut self) -> Option<(&mut TaskArgs, ChipId)> {
        let last = self.members.checked_sub(1)?;
        Some((self.storage.args.get_mut(last)?, *self.storage.workers.get(last)?))
    }

    fn complain(&mut self, error: Error) {
        self.wrong.get_or_insert(error);
    }

    /// Submits the group. Opens the dispatch.
    ///
    /// # Errors
    ///
    /// [`Error::Build`]: no members, a chip named twice, arguments that do not match the signature, exceed a limit,
    /// end beyond their memory or live on another chip (nothing was done). [`Error::Backend`]: the backend refused or failed.
    pub fn submit(mut self) -> Result<(), Error> {
        if let Some(error) = self.wrong.take() {
            return Err(error);
        }
        expect_kind(self.callable, CallableKind::Chip)?;
        let workers = &self.storage.workers;
        if workers.is_empty() {
            return Err(Error::build("a group needs at least one member"));
        }
        for (index, chip) in workers.iter().enumerate() {
            check_worker(self.build, *chip)?;
            if workers[..index].contains(chip) {
                return Err(Error::build(format!("{chip} is named twice in one group: name each chip once")));
            }
        }
        let Some(args) = self.storage.args.get(..self.members) else {
            return Err(Error::broken("a group lost the arguments of a member"));
        };
        for member in args {
            check_args(self.build, self.callable, member)?;
        }
        self.build.open()?;
        self.build.state.tasks.set(true);
        self.build.effect(Call::SubmitNextLevelGroup, || {
            self.build.orchestrator.submit_next_level_group(
                self.callable.id,
                args,
                Some(self.build.config),
                workers,
            )
        })
    }
}

impl Drop for Group<'_, '_> {
    fn drop(&mut self) {
        let storage = std::mem::take(&mut self.storage);
        self.build.state.storage.borrow_mut().groups.push(storage);
    }
}

impl std::fmt::Debug for Group<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("callable", &self.callable.name).field("members", &self.members).finish()
    }
}

fn note_chip(known: &mut Result<Option<ChipId>, (ChipId, ChipId)>, chip: Option<ChipId>) {
    match (&known, chip) {
        (Ok(None), Some(chip)) => *known = Ok(Some(chip)),
        (Ok(Some(first)), Some(chip)) if *first != chip => *known = Err((*first, chip)),
        _ => {}
    }
}

fn check_chip(
    callable: &Callable,
    known: Result<Option<ChipId>, (ChipId, ChipId)>,
    target: ChipId,
) -> Result<(), Error> {
    let home = match known {
        Ok(None) => return Ok(()),
        Ok(Some(home)) if home == target => return Ok(()),
        Ok(Some(home)) => home,
        Err((first, second)) => {
            if first == target {
                second
            } else {
                first
            }
        }
    };
    Err(Error::build(format!("a tensor on {home} cannot be an argument of `{}` on {target}", callable.name)))
}

fn check_worker(build: &Build<'_>, chip: ChipId) -> Result<(), Error> {
    let chips = build.chips();
    if chip.0 < chips {
        Ok(())
    } else {
        Err(Error::build(format!("{chip} does not exist: there are {chips} chips")))
    }
}

pub(crate) fn expect_kind(callable: &Callable, wanted: CallableKind) -> Result<(), Error> {
    if callable.kind == wanted {
        return Ok(());
    }
    Err(Error::build(format!(
        "callable `{}` is of kind {:?}, this call takes {wanted:?}",
        callable.name, callable.kind
    )))
}

/// Runtimes do not check argument counts (too few end a chip process), so this does, before submission.
fn check_args(build: &Build<'_>, callable: &Callable, args: &TaskArgs) -> Result<(), Error> {
    let (tensors, scalars) = (args.tensors().len(), args.scalars().len());
    if let Some(signature) = &callable.signature
        && (tensors, scalars) != (signature.tensors.len(), signature.scalars as usize)
    {
        return Err(Error::build(format!(
            "`{}` takes {} tensors and {} scalars, given {tensors} and {scalars}",
            callable.name,
            signature.tensors.len(),
            signature.scalars
        )));
    }
    let limits = &build.inner.capabilities.limits;
    if tensors > limits.tensors as usize || scalars > limits.scalars as usize {
        return Err(Error::build(format!(
            "a task of `{}` has {tensors} tensors and {scalars} scalars, the backend takes at most {} and {}",
            callable.name, limits.tensors, limits.scalars
        )));
    }
    Ok(())
}
