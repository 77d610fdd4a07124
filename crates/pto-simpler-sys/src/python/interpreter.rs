//! The embedded interpreter: one per process, started here and nowhere else, never finalised.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::options::SimplerOptions;
use super::result;
use crate::error::{BackendError, Call, RuntimeFailure};

/// What has been done to the interpreter so far.
#[derive(Debug, Default)]
struct Applied {
    path: Vec<PathBuf>,
    sites: BTreeSet<PathBuf>,
    preludes: BTreeSet<String>,
}

/// Serialises the preparation. Preparing attaches under this lock, so it is taken detached and, like the build lock,
/// never by an attached thread.
static APPLIED: Mutex<Option<Applied>> = Mutex::new(None);

/// Starts the interpreter if need be and applies the options to it: search path, site directories with their `.pth`
/// files, `sys.executable`, then the prelude. Options given twice are applied once.
pub(crate) fn prepare(options: &SimplerOptions) -> Result<(), BackendError> {
    if initialized() {
        check_detached(Call::Start)?;
    }
    if let Some(path) = options.sys_executable.as_ref().filter(|path| !path.exists()) {
        return Err(BackendError::misuse(
            Call::Start,
            format!("sys_executable is {path:?}, which does not exist; name the interpreter to start helpers with"),
        ));
    }
    let mut guard = APPLIED.lock();
    initialize(executable(options).as_deref())?;
    let applied = guard.get_or_insert_default();
    Python::attach(|py| {
        let sys = py.import("sys").map_err(|e| result::failure(py, Call::Start, &e))?;
        apply(py, &sys, options, applied).map_err(|e| BackendError::from(result::failure(py, Call::Start, &e)))?;
        run_prelude(py, options, applied)
    })
}

fn initialized() -> bool {
    // SAFETY: may be called at any time, initialised or not.
    unsafe { ffi::Py_IsInitialized() != 0 }
}

/// Starts the interpreter as if it had been started by the command `executable`, so that the standard library of that
/// very installation is found and a virtual environment is recognised. (Left to itself, an embedded interpreter
/// searches PATH for any `python3`.) Signals stay the host's own. Called under the lock of [`APPLIED`].
fn initialize(executable: Option<&Path>) -> Result<(), BackendError> {
    if initialized() {
        return Ok(());
    }
    let executable =
        executable.map(|path| CString::new(path.as_os_str().as_bytes())).transpose().map_err(|_| {
            BackendError::misuse(Call::Start, "the path of the Python interpreter contains a zero byte")
        })?;
    let mut config = MaybeUninit::<ffi::PyConfig>::zeroed();
    // SAFETY: `config` is initialised by `PyConfig_InitPythonConfig` before any other use and cleared once at the
    // end; `executable` outlives the call that copies it. The interpreter is not initialised, and nobody else
    // initialises it meanwhile through this crate. `PyEval_SaveThread` detaches the thread that initialised it, as
    // the rest of the crate expects.
    let failure = unsafe {
        ffi::PyConfig_InitPythonConfig(config.as_mut_ptr());
        (*config.as_mut_ptr()).install_signal_handlers = 0;
        (*config.as_mut_ptr()).parse_argv = 0;
        let mut status = ffi::PyStatus_Ok();
        if let Some(executable) = &executable {
            let field = &raw mut (*config.as_mut_ptr()).executable;
            status = ffi::PyConfig_SetBytesString(config.as_mut_ptr(), field, executable.as_ptr());
        }
        if ffi::PyStatus_Exception(status) == 0 {
            status = ffi::Py_InitializeFromConfig(config.as_ptr());
        }
        ffi::PyConfig_Clear(config.as_mut_ptr());
        if ffi::PyStatus_Exception(status) == 0 {
            ffi::PyEval_SaveThread();
            None
        } else if status.err_msg.is_null() {
            Some("no message".to_owned())
        } else {
            Some(CStr::from_ptr(status.err_msg).to_string_lossy().into_owned())
        }
    };
    match failure {
        None => Ok(()),
        Some(mut message) => {
            // The usual culprits.
            for name in ["PYTHONHOME", "PYTHONPATH"] {
                if let Some(value) = std::env::var_os(name) {
                    message.push_str(&format!("; {name} is {value:?}"));
                }
            }
            Err(RuntimeFailure::new(Call::Start, "PyStatus", message).into())
        }
    }
}

fn apply(
    py: Python<'_>,
    sys: &Bound<'_, PyModule>,
    options: &SimplerOptions,
    applied: &mut Applied,
) -> PyResult<()> {
    if let Some(executable) = executable(options) {
        sys.setattr("executable", executable.as_os_str())?;
    }
    let path = sys.getattr("path")?.cast_into::<PyList>()?;
    let mut at = 0;
    for directory in &options.python_path {
        if !applied.path.contains(directory) {
            path.insert(at, directory.as_os_str())?;
            applied.path.push(directory.clone());
            at += 1;
        }
    }
    let sites =
        options.environment.iter().flat_map(|root| site_of(py, root)).chain(options.site_directories.clone());
    for site in sites {
        if !applied.sites.contains(&site) {
            py.import("site")?.call_method1("addsitedir", (site.as_os_str(),))?;
            applied.sites.insert(site);
        }
    }
    Ok(())
}

fn run_prelude(py: Python<'_>, options: &SimplerOptions, applied: &mut Applied) -> Result<(), BackendError> {
    let Some(prelude) = options.prelude.as_ref().filter(|prelude| !applied.preludes.contains(*prelude)) else {
        return Ok(());
    };
    let (module, function) = prelude.split_once(':').unwrap_or((prelude, "install"));
    let function = py.import(module).and_then(|module| module.getattr(function)).map_err(|e| {
        let mut failure = result::failure(py, Call::Start, &e);
        failure.message =
            format!("the prelude {prelude:?} (`module:function`) cannot be loaded: {}", failure.message);
        BackendError::from(failure)
    })?;
    function.call0().map_err(|e| BackendError::from(result::failure(py, Call::Start, &e)))?;
    applied.preludes.insert(prelude.clone());
    Ok(())
}

/// The interpreter that helper processes are started with.
fn executable(options: &SimplerOptions) -> Option<PathBuf> {
    let of_environment = options.environment.as_deref().map(|root| root.join("bin").join("python3"));
    let of_build = option_env!("PTO_BUILD_PYTHON").map(PathBuf::from);
    options.sys_executable.clone().or_else(|| of_environment.into_iter().chain(of_build).find(|p| p.exists()))
}

/// The site directory of a virtual environment, for the version that is embedded.
pub(crate) fn site_of(py: Python<'_>, root: &Path) -> Option<PathBuf> {
    let version = py.version_info();
    let site = root.join("lib").join(format!("python{}.{}", version.major, version.minor)).join("site-packages");
    site.is_dir().then_some(site)
}

/// Whether this thread is attached to the interpreter.
pub(crate) fn attached() -> bool {
    // SAFETY: the function only reads the thread's state. It must not run before the interpreter is initialised
    // (it answers yes then); every caller has a backend, whose construction initialised it.
    unsafe { ffi::PyGILState_Check() == 1 }
}

/// Refuses an attached thread: whatever it would wait for may itself need the interpreter.
pub(crate) fn check_detached(call: Call) -> Result<(), BackendError> {
    if attached() {
        return Err(BackendError::misuse(
            call,
            "this thread is attached to the Python interpreter, which the call may have to wait for; detach first \
             (`Python::detach`), then call",
        ));
    }
    Ok(())
}

/// How modules are searched for, for messages about one that is missing.
pub(crate) fn searched(py: Python<'_>) -> String {
    let path = || -> PyResult<String> {
        let sys = py.import("sys")?;
        let path: Vec<String> = sys.getattr("path")?.extract()?;
        Ok(format!("interpreter {}, sys.path {path:?}", sys.getattr("executable")?))
    };
    path().unwrap_or_else(|e| format!("sys.path cannot be read: {e}"))
}
