//! The check that nothing is left in shared memory (I14).

use std::path::Path;
use std::sync::Once;

use tempfile::TempDir;

/// What names begin with; the process and a random part follow.
const PREFIX: &str = "pto-tests-";

/// Removes directories of tests that were killed before they could. The emulator unlinks its names at once, so such a
/// directory is empty; one that is not is left for somebody to look at, and so is one whose process lives.
fn sweep(root: &Path) {
    let Ok(entries) = std::fs::read_dir(root) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(|rest| rest.split('-').next());
        let Some(process) = process.and_then(|process| process.parse::<u32>().ok()) else { continue };
        if Path::new("/proc/self").exists() && !Path::new("/proc").join(process.to_string()).exists() {
            // Another test may be faster; nothing else can be done about a failure.
            let _gone = std::fs::remove_dir(entry.path());
        }
    }
}

/// A directory of real shared memory that only one test uses, so that its listing can be compared. Falls back to the
/// temporary directory where the system has no `/dev/shm`.
#[derive(Debug)]
pub struct ShmDir {
    dir: TempDir,
}

impl Default for ShmDir {
    fn default() -> Self {
        Self::new()
    }
}

impl ShmDir {
    /// A new, empty directory.
    #[must_use]
    pub fn new() -> Self {
        let shm = Path::new("/dev/shm");
        let root = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| sweep(&root));
        let prefix = format!("{PREFIX}{}-", std::process::id());
        Self { dir: tempfile::Builder::new().prefix(&prefix).tempdir_in(root).unwrap() }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Names that exist in it now.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    /// Mappings and file descriptors of this process that lead into it, deleted files included.
    #[must_use]
    pub fn held(&self) -> Vec<String> {
        let own = self.path().to_string_lossy().into_owned();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let mut held: Vec<String> = maps.lines().filter(|line| line.contains(&own)).map(str::to_owned).collect();
        if let Ok(entries) = std::fs::read_dir("/proc/self/fd") {
            let targets = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
            held.extend(targets.map(|t| t.to_string_lossy().into_owned()).filter(|t| t.contains(&own)));
        }
        held
    }

    /// Nothing is left: no name, no mapping, no descriptor.
    ///
    /// # Panics
    ///
    /// Where something is, with a list.
    #[track_caller]
    pub fn assert_clean(&self) {
        assert_eq!(self.names(), Vec::<String>::new(), "names left in shared memory");
        assert_eq!(self.held(), Vec::<String>::new(), "mappings or descriptors left");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_dead_processes_are_swept_where_they_are_empty() {
        let root = tempfile::tempdir().unwrap();
        // No process has the largest number; the kernel's limit is far below.
        let dead = root.path().join(format!("{PREFIX}{}-a", u32::MAX));
        let kept = [
            root.path().join(format!("{PREFIX}{}-b", std::process::id())),
            root.path().join(format!("{PREFIX}{}-full", u32::MAX)),
            root.path().join("pto-tests-nobody"),
            root.path().join("else"),
        ];
        for path in kept.iter().chain([&dead]) {
            std::fs::create_dir(path).unwrap();
        }
        std::fs::write(kept[1].join("left"), b"").unwrap();
        sweep(root.path());
        assert!(kept.iter().all(|path| path.exists()));
        assert_eq!(dead.exists(), !Path::new("/proc/self").exists());
    }
}
