//! One process for one test: hang guard, machine-wide lock, and re-execution.

use std::env;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::HANG_GUARD;

/// Set in a process that was made for one test; its value is the test's path.
const MARKER: &str = "PTO_CONFORMANCE_CHILD";

/// The lock file's name in the system's directory for temporary files.
const LOCK: &str = "pto-process-backed.lock";

/// The full name of a generated test, as the test binary's `--exact` wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestPath(String);

impl TestPath {
    /// The test `name` in the module that `module_path!()` gives.
    #[must_use]
    pub fn new(module: &str, name: &str) -> Self {
        // The harness leaves out the crate's name.
        Self(module.split_once("::").map_or_else(|| name.to_owned(), |(_, inner)| format!("{inner}::{name}")))
    }

    /// The path as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this process was made for this test.
    #[must_use]
    pub fn is_child(&self) -> bool {
        env::var_os(MARKER).is_some_and(|value| value == *self.0)
    }
}

/// Why a test in its own process did not pass.
#[derive(Debug)]
pub(super) enum Failure {
    /// It failed and said so.
    Failed(String),
    /// Its process hung or died.
    Died(String),
}

/// Runs the test at `path` in a process of its own, alone on the machine among its like.
pub(super) fn rerun(path: TestPath) -> Result<(), Failure> {
    let (status, text) = run(&path)?;
    print!("{text}");
    match status.code() {
        Some(0) if text.contains("1 passed") => Ok(()),
        Some(0) => Err(Failure::Failed(format!("its own process ran no test called {}", path.as_str()))),
        Some(code) => Err(Failure::Failed(format!("its own process failed (exit code {code})"))),
        None => Err(Failure::Died(format!("its own process died ({status})"))),
    }
}

fn run(path: &TestPath) -> Result<(ExitStatus, String), Failure> {
    let _lock = machine_lock().map_err(Failure::Failed)?;
    // A file, not a pipe: a process that the backend forked and lost would keep a pipe open for ever.
    let output = tempfile::tempfile().map_err(|e| failed("no file for the test's output", e))?;
    let shared = |file: &File| file.try_clone().map_err(|e| failed("the test's output cannot be shared", e));
    let binary = env::current_exe().map_err(|e| failed("the test binary is not known", e))?;
    let child = Command::new(binary)
        .args([path.as_str(), "--exact", "--nocapture", "--test-threads=1", "--include-ignored"])
        .env(MARKER, path.as_str())
        .stdin(Stdio::null())
        .stdout(shared(&output)?)
        .stderr(shared(&output)?)
        .spawn()
        .map_err(|e| failed("the test binary cannot be run again", e))?;
    // The child's own guard comes first; this one is for a child that cannot even abort.
    let status = wait(child, HANG_GUARD + Duration::from_secs(30))?;
    let bytes = contents(&output).map_err(|e| failed("the test's output cannot be read", e))?;
    Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
}

/// Everything in the file, without its shared offset: what the test left behind may still write there.
fn contents(file: &File) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 8192];
    loop {
        match file.read_at(&mut chunk, bytes.len() as u64) {
            Ok(0) => return Ok(bytes),
            Ok(n) => bytes.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn failed(what: &str, error: std::io::Error) -> Failure {
    Failure::Failed(format!("{what}: {error}"))
}

fn wait(mut child: Child, at_most: Duration) -> Result<ExitStatus, Failure> {
    let Ok(id) = i32::try_from(child.id()) else {
        return Err(Failure::Failed(format!("process id {} is out of range", child.id())));
    };
    let (ended, end) = mpsc::channel();
    let waiter = thread::Builder::new()
        .name("test-process".into())
        .spawn(move || ended.send(child.wait()))
        .map_err(|e| failed("no thread to wait for the test's own process", e))?;
    let unwaited = |e| failed("its own process cannot be waited for", e);
    match end.recv_timeout(at_most) {
        Ok(status) => status.map_err(unwaited),
        Err(RecvTimeoutError::Timeout) => {
            // Not reaped yet, or the waiter would have said so: the id is still this child's.
            let killed = kill(Pid::from_raw(id), Signal::SIGKILL);
            let _ = waiter.join();
            Err(Failure::Died(format!("its own process hung for {at_most:?} and was killed ({killed:?})")))
        }
        Err(RecvTimeoutError::Disconnected) => {
            Err(Failure::Failed("the thread that waits for the test's own process is gone".into()))
        }
    }
}

fn machine_lock() -> Result<Flock<File>, String> {
    let path = env::temp_dir().join(LOCK);
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|e| format!("lock file {}: {e}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| format!("lock file {}: {e}", path.display()))
}

/// Aborts the process where a rule takes longer than [`HANG_GUARD`].
pub(super) struct HangGuard(Option<Sender<()>>);

impl HangGuard {
    pub(super) fn arm(rule: &str) -> Self {
        let (alive, gone) = mpsc::channel::<()>();
        let rule = rule.to_owned();
        let watch = move || {
            if gone.recv_timeout(HANG_GUARD) == Err(RecvTimeoutError::Timeout) {
                eprintln!("conformance rule {rule} hangs: no end after {HANG_GUARD:?}; aborting the process");
                std::process::abort();
            }
        };
        // Without a thread there is no guard, and a hang is the harness's to notice.
        let armed = thread::Builder::new().name("hang-guard".into()).spawn(watch).is_ok();
        Self(armed.then_some(alive))
    }
}

impl Drop for HangGuard {
    fn drop(&mut self) {
        self.0 = None;
    }
}
