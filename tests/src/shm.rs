//! The check that nothing is left in shared memory (I14).

use std::path::Path;

use tempfile::TempDir;

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
        Self { dir: tempfile::Builder::new().prefix("pto-tests-").tempdir_in(root).unwrap() }
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
