//! The processes that a worker started, and the shared memory that they and it have linked.
//!
//! Only these are ever signalled or unlinked: processes by the ids that the worker itself reports; shared memory by
//! names that the worker reports, that are found mapped in those very processes, or that are windows of this process
//! which no living process has mapped any more.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::mman::shm_unlink;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use parking_lot::Mutex;

use crate::ids::ChipId;

/// How often processes are asked after that no descriptor tells of.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The worker's child processes.
#[derive(Debug, Default)]
pub(crate) struct Children {
    chips: Mutex<BTreeMap<i32, ChipId>>,
    subs: Mutex<BTreeSet<i32>>,
    /// Names of shared memory that belong to this worker, without the leading slash.
    names: Mutex<BTreeSet<String>>,
    /// Chips that have died as far as somebody noticed, the first one first.
    dead: Mutex<Vec<(ChipId, Death)>>,
    /// The worker is being closed: a chip process that exits as it should has not died.
    closing: AtomicBool,
}

/// How a chip process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Death {
    pub(crate) exit_code: Option<i32>,
    pub(crate) signal: Option<i32>,
}

impl Death {
    /// Whether a process that was asked to exit may have ended like this: with code 0, or reaped by somebody who
    /// saw how.
    const fn is_orderly(self) -> bool {
        self.signal.is_none() && matches!(self.exit_code, None | Some(0))
    }
}

impl Children {
    #[cfg(test)]
    pub(crate) fn for_test(chips: &[(i32, u32)], subs: &[i32]) -> Self {
        let children = Self::default();
        children.chips.lock().extend(chips.iter().map(|(pid, chip)| (*pid, ChipId(*chip))));
        children.subs.lock().extend(subs);
        children
    }

    /// Takes note of the processes of a worker that has just started.
    pub(crate) fn started(&self, chips: &[i32], subs: &[i32], mailboxes: Vec<String>) {
        *self.chips.lock() = chips.iter().copied().zip((0..).map(ChipId)).collect();
        *self.subs.lock() = subs.iter().copied().collect();
        self.names.lock().extend(mailboxes);
    }

    /// The chip whose process this is.
    pub(crate) fn chip_of(&self, pid: i32) -> Option<ChipId> {
        self.chips.lock().get(&pid).copied()
    }

    /// All chips and their processes.
    pub(crate) fn chip_processes(&self) -> Vec<(ChipId, u32)> {
        let chips = self.chips.lock();
        let mut all: Vec<(ChipId, u32)> = chips.iter().map(|(pid, chip)| (*chip, pid.unsigned_abs())).collect();
        all.sort();
        all
    }

    /// From now on chip processes may exit by themselves.
    pub(crate) fn closing(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    /// Forgets processes that an orderly close has ended.
    pub(crate) fn clear(&self) {
        self.chips.lock().clear();
        self.subs.lock().clear();
        self.names.lock().clear();
    }

    /// The first chip known to have died. Later ones may have been ended because of it.
    pub(crate) fn first_death(&self) -> Option<(ChipId, Death)> {
        self.dead.lock().first().copied()
    }

    /// Takes note of a death that somebody else noticed.
    pub(crate) fn died(&self, chip: ChipId, death: Death) {
        if !self.is_dead(chip) {
            self.dead.lock().push((chip, death));
        }
    }

    /// The first chip of these that is known to have died.
    pub(crate) fn first_death_among(&self, chips: &[ChipId]) -> Option<(ChipId, Death)> {
        self.dead.lock().iter().find(|(chip, _)| chips.contains(chip)).copied()
    }

    /// Whether every process of the worker has ended.
    pub(crate) fn all_gone(&self) -> bool {
        let chips: Vec<i32> = self.chips.lock().keys().copied().collect();
        let subs: Vec<i32> = self.subs.lock().iter().copied().collect();
        chips.into_iter().chain(subs).all(|pid| death_of(pid).is_some())
    }

    fn is_dead(&self, chip: ChipId) -> bool {
        self.dead.lock().iter().any(|(dead, _)| *dead == chip)
    }

    /// Asks the system which chip processes have ended.
    pub(crate) fn look(&self) {
        let chips: Vec<(i32, ChipId)> = self.chips.lock().iter().map(|(pid, chip)| (*pid, *chip)).collect();
        for (pid, chip) in chips {
            if !self.is_dead(chip)
                && let Some(death) = death_of(pid)
                && !(self.closing.load(Ordering::SeqCst) && death.is_orderly())
            {
                self.dead.lock().push((chip, death));
            }
        }
    }

    /// Takes note of the windows that the chip processes have mapped now, so that they can still be found when these
    /// are gone.
    fn note_windows(&self) {
        let pids: Vec<i32> = self.chips.lock().keys().copied().collect();
        for pid in pids {
            let found = windows_mapped_by(pid);
            self.names.lock().extend(found);
        }
    }

    /// Ends all chip processes by force and leaves their remains to the runtime, whose calls that wait for them then
    /// come back at once. Returns the chips that were still alive.
    pub(crate) fn end_chips(&self) -> Vec<ChipId> {
        self.look();
        self.note_windows();
        let chips: Vec<(i32, ChipId)> = self.chips.lock().iter().map(|(pid, chip)| (*pid, *chip)).collect();
        chips
            .into_iter()
            // One that has exited as it should is not dead, but gone; its number may be somebody else's by now.
            .filter(|(pid, chip)| !self.is_dead(*chip) && death_of(*pid).is_none())
            .filter(|(pid, _)| kill(Pid::from_raw(*pid), Signal::SIGKILL).is_ok())
            .map(|(_, chip)| chip)
            .collect()
    }

    /// Ends every process of the worker by force. Returns the chips that were still alive.
    pub(crate) fn end_all(&self) -> Vec<ChipId> {
        let ended = self.end_chips();
        let subs: Vec<i32> = self.subs.lock().iter().copied().collect();
        for pid in subs.into_iter().filter(|pid| death_of(*pid).is_none()) {
            // A process that has gone by itself meanwhile is what is wanted.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        ended
    }

    /// Ends every process of the worker by force, reaps them within `limit` and unlinks their shared memory. Returns
    /// the chips that were still alive and what is left.
    pub(crate) fn destroy(&self, limit: Duration) -> (Vec<ChipId>, Vec<String>) {
        let deserted = deserted_windows();
        let ended = self.end_all();
        let subs: Vec<i32> = self.subs.lock().iter().copied().collect();
        let deadline = Instant::now() + limit;
        let all = self.chips.lock().keys().copied().chain(subs).collect::<Vec<i32>>();
        let waiting: Vec<i32> = all.into_iter().filter(|pid| !reap(*pid, deadline)).collect();
        // Windows of members that had died before. A window of another worker of this process that is just being
        // made is mapped a moment after it gets its name, so it is not deserted twice.
        let still = deserted_windows();
        self.own_names(deserted.into_iter().filter(|name| still.contains(name)));
        let mut left: Vec<String> = waiting.iter().map(|pid| format!("process {pid}")).collect();
        for name in std::mem::take(&mut *self.names.lock()) {
            match shm_unlink(format!("/{name}").as_str()) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(e) => left.push(format!("shared memory {name} ({e})")),
            }
        }
        self.chips.lock().clear();
        self.subs.lock().clear();
        (ended, left)
    }

    /// Adds names that `destroy` unlinks.
    pub(crate) fn own_names(&self, names: impl IntoIterator<Item = String>) {
        self.names.lock().extend(names);
    }

    /// Descriptors that become readable when a chip process ends, and whether there is one for each: an old system
    /// has none, and a process may have no room for more.
    fn watch(&self) -> (Vec<OwnedFd>, bool) {
        let chips = self.chips.lock();
        let watched: Vec<OwnedFd> = chips.keys().filter_map(|pid| pidfd(*pid)).collect();
        let all = watched.len() == chips.len();
        (watched, all)
    }

    /// Whether a chip process has ended, in whatever way.
    fn any_gone(&self) -> bool {
        let chips: Vec<i32> = self.chips.lock().keys().copied().collect();
        chips.into_iter().any(|pid| death_of(pid).is_some())
    }
}

/// What the names of this process's windows begin with.
fn window_prefix() -> String {
    format!("simpler_{:08x}_", std::process::id())
}

/// The windows of this process that the process `pid` has mapped.
fn windows_mapped_by(pid: i32) -> BTreeSet<String> {
    let Ok(maps) = std::fs::read_to_string(format!("/proc/{pid}/maps")) else { return BTreeSet::new() };
    let ours = window_prefix();
    maps.lines()
        .filter_map(|line| line.split_once("/dev/shm/"))
        .map(|(_, name)| name.trim_end_matches(" (deleted)").to_owned())
        .filter(|name| name.starts_with(&ours))
        .collect()
}

/// The windows of this process that have a name but are mapped by no process.
fn deserted_windows() -> BTreeSet<String> {
    let ours = window_prefix();
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let mut names: BTreeSet<String> =
        names.filter_map(|e| e.file_name().into_string().ok()).filter(|name| name.starts_with(&ours)).collect();
    if names.is_empty() {
        return names;
    }
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in processes.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok()) {
        for mapped in windows_mapped_by(pid) {
            names.remove(&mapped);
        }
    }
    names
}

/// Waits for the end of a child until `deadline`, and reaps it; whether it is gone.
fn reap(pid: i32, deadline: Instant) -> bool {
    let end = pidfd(pid);
    while death_of(pid).is_none() {
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            break;
        }
        match &end {
            Some(end) => {
                let timeout = PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX);
                // However it ends, the process is asked after.
                let _ = poll(&mut [PollFd::new(end.as_fd(), PollFlags::POLLIN)], timeout);
            }
            None => std::thread::sleep(rest.min(LOOK_INTERVAL)),
        }
    }
    !matches!(waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive))
}

/// How a child has ended, if it has. Does not reap it: that is the runtime's business.
fn death_of(pid: i32) -> Option<Death> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    match waitid(Id::Pid(Pid::from_raw(pid)), flags) {
        Ok(WaitStatus::Exited(_, code)) => Some(Death { exit_code: Some(code), signal: None }),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(Death { exit_code: None, signal: Some(signal as i32) }),
        // Reaped by the runtime, which noticed it first; its message says how it ended.
        Err(Errno::ECHILD) => Some(Death { exit_code: None, signal: None }),
        _ => None,
    }
}

/// A descriptor that becomes readable when the process ends; close-on-exec, as the system makes all of them.
fn pidfd(pid: i32) -> Option<OwnedFd> {
    // SAFETY: a system call on plain integers; it has no memory effects.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the system has just given us this descriptor, and nobody else knows it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Watches the chip processes and says when the first one has ended.
#[derive(Debug)]
pub(crate) struct Monitor {
    process: u32,
    stop: Arc<EventFd>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Monitor {
    /// Calls `died` once, on a thread of its own, when a chip process ends while the monitor runs. `died` gets the
    /// descriptor with which the monitor is told to stop, so that it can wait on it as well.
    pub(crate) fn start(
        children: Arc<Children>,
        died: impl FnOnce(&StopSignal) + Send + 'static,
    ) -> Result<Self, Errno> {
        let stop = Arc::new(EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let signal = StopSignal(Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("pto-chip-monitor".to_owned())
            .spawn(move || {
                let (processes, all) = children.watch();
                let mut fds = vec![PollFd::new(signal.0.as_fd(), PollFlags::POLLIN)];
                fds.extend(processes.iter().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
                let interval = PollTimeout::try_from(LOOK_INTERVAL).unwrap_or(PollTimeout::MAX);
                loop {
                    match poll(&mut fds, if all { PollTimeout::NONE } else { interval }) {
                        Err(Errno::EINTR) => continue,
                        Err(_) => return,
                        Ok(_) if fds.first().is_some_and(|fd| fd.any() == Some(true)) => return,
                        Ok(0) if !children.any_gone() => {}
                        Ok(_) => break,
                    }
                }
                drop(fds);
                children.look();
                died(&signal);
            })
            .map_err(|e| e.raw_os_error().map_or(Errno::EAGAIN, Errno::from_raw))?;
        Ok(Self { process: std::process::id(), stop, thread: Some(thread) })
    }

    /// Ends the watch and its thread.
    pub(crate) fn stop(mut self) {
        self.join();
    }

    fn join(&mut self) {
        if std::process::id() != self.process {
            // A forked child has a copy of the descriptor, which is the parent's to write to, and no such thread.
            std::mem::forget(self.thread.take());
            return;
        }
        // A full counter is as readable as one just written to.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.join();
    }
}

/// Becomes readable when the monitor is told to stop.
#[derive(Debug)]
pub(crate) struct StopSignal(Arc<EventFd>);

impl StopSignal {
    /// Waits for the signal, no longer than `limit`; whether it came.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        // None: later than any clock says.
        let deadline = Instant::now().checked_add(limit);
        loop {
            let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = rest.and_then(|rest| PollTimeout::try_from(rest).ok()).unwrap_or(PollTimeout::MAX);
            let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, timeout) {
                Ok(0) if rest.is_some_and(|rest| rest.is_zero()) => return false,
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) | Err(_) => return true,
            }
        }
    }
}

#[cfg(test)]
#[expect(clippy::zombie_processes, reason = "the code under test reaps them")]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::process::{Command, Stdio};

    fn sleeper() -> std::process::Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn the_monitor_tells_of_a_death_and_of_how_it_came() {
        let child = sleeper();
        let pid = child.id() as i32;
        let children = Arc::new(Children::for_test(&[(pid, 3)], &[]));
        let (sender, receiver) = std::sync::mpsc::channel();
        let monitor = Monitor::start(Arc::clone(&children), move |_| sender.send(()).unwrap()).unwrap();
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        receiver.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(children.first_death(), Some((ChipId(3), Death { exit_code: None, signal: Some(9) })));
        monitor.stop();
        let (ended, left) = children.destroy(Duration::from_secs(60));
        assert!(ended.is_empty() && left.is_empty(), "{ended:?} {left:?}");
    }

    #[test]
    fn a_monitor_that_saw_no_death_stops_silently() {
        let child = sleeper();
        let children = Arc::new(Children::for_test(&[(child.id() as i32, 0)], &[]));
        let monitor = Monitor::start(Arc::clone(&children), |_| unreachable!()).unwrap();
        monitor.stop();
        let (ended, left) = children.destroy(Duration::from_secs(60));
        assert_eq!((ended, left), (vec![ChipId(0)], vec![]));
    }

    #[test]
    fn a_process_that_has_exited_in_order_was_not_ended_by_force() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let pid = child.id() as i32;
        let children = Children::for_test(&[(pid, 0)], &[]);
        children.closing();
        drop(child.stdin.take());
        waitid(Id::Pid(Pid::from_raw(pid)), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
        assert_eq!(children.end_chips(), []);
        assert_eq!((children.first_death(), children.destroy(Duration::from_secs(60))), (None, (vec![], vec![])));
    }

    #[test]
    fn a_signal_is_waited_for_however_long_that_may_be() {
        for limit in [Duration::from_secs(1 << 40), Duration::MAX] {
            let event = Arc::new(EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).unwrap());
            let signal = StopSignal(Arc::clone(&event));
            let waiting = std::thread::spawn(move || signal.wait(limit));
            event.write(1).unwrap();
            assert!(waiting.join().unwrap());
        }
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).unwrap();
        assert!(!StopSignal(Arc::new(event)).wait(Duration::ZERO));
    }

    #[test]
    fn descriptors_of_processes_are_close_on_exec() {
        let fd = pidfd(std::process::id() as i32).unwrap();
        // SAFETY: reads the flags of a descriptor that is open.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_ne!(flags & libc::FD_CLOEXEC, 0);
    }
}
