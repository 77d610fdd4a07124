//! The binding to the genuine Simpler runtime (feature `simpler`): CPython embedded in this process.
//!
//! # What it does
//!
//! [`SimplerBackend`] implements [`Backend`](crate::Backend) and [`Orchestrator`](crate::Orchestrator) over Simpler's
//! public Python interface. Nothing above it knows that there is an interpreter. [`SimplerOptions`] say which devices,
//! where the runtime is installed and how domains are retained; [`SimplerBackend::new`] starts the interpreter (in one
//! place, once per process), imports the runtime and reports what it offers before anything is started.
//!
//! # Levels
//!
//! 1. `sys`: raw calls, one function per runtime call, names interned, classes looked up once.
//! 2. `result`: typed failures. Type name, message and traceback text of every exception are kept; what a message
//!    says about chips and processes is read in one place.
//! 3. Everything else: ownership. Who holds which Python object, on which thread, until when.
//!
//! # Threads
//!
//! | Thread | Does |
//! |---|---|
//! | owner | starts and closes the worker, with one Python thread state for its whole life |
//! | waiter | waits for every run in submission order, then reports its end |
//! | monitor | notices when a chip process ends by itself |
//! | callers | build graphs, copy, release: attached for each call, detached in between |
//!
//! 1. Builders run detached; each orchestrator call attaches by itself.
//! 2. A thread that is attached to the interpreter is refused by everything that may block, before any lock: whatever
//!    it would wait for may need the interpreter. [`Backend::check_blocking`](crate::Backend::check_blocking) asks.
//! 3. The build lock is the only lock of the binding under which a thread attaches; all others are leaves.
//! 4. `submit`, `close` and `release_buffer` inside a graph build are refused before they reach Python, where they
//!    would wait for themselves for ever.
//!
//! # Processes
//!
//! Starting forks without exec. Before the first start, do not hold descriptors that a chip process must not inherit
//! (the binding's own are close-on-exec), and do not rely on threads: only the forking thread exists in the children.
//! Memory that tasks of generated programs reach by address must exist before the start. A backend that a forked
//! child inherited refuses every call there.
//!
//! # The end of a worker
//!
//! A started worker that is not closed is never collected, and the interpreter is never finalised: either would end
//! the process. A backend that is dropped open leaks its worker and says so. A failed chip task is final: the chip's
//! run lane stays poisoned although the runtime would admit more, so the backend refuses it and says why. When a chip
//! process dies, runs that wait for it are given [`SimplerOptions::dead_chip_grace`] and then freed by ending the
//! peers; `close` then ends, and [`abandon`](crate::Backend::abandon) ends everything by force at any time.
//!
//! # Linking
//!
//! The build script sets an rpath for this package's own tests. Cargo does not hand that on, so a package with
//! binaries adds this to its own build script (the variable exists where it depends on this one directly):
//!
//! ```no_run
//! if let Ok(directory) = std::env::var("DEP_PTO_PYTHON_LIB_DIR") {
//!     println!("cargo:rustc-link-arg=-Wl,-rpath,{directory}");
//! }
//! ```
//!
//! # Example
//!
//! ```no_run
//! use pto_simpler_sys::python::{SimplerBackend, SimplerOptions};
//! use pto_simpler_sys::Backend;
//!
//! let backend = SimplerBackend::new(SimplerOptions::new("a2a3sim", [0, 1]))?;
//! println!("{:?}: {:?}", backend.runtime(), backend.capabilities().retention);
//! # Ok::<(), pto_simpler_sys::BackendError>(())
//! ```

mod args;
mod building;
mod callables;
mod domains;
mod ending;
mod entry;
mod host;
mod interpreter;
mod legacy;
mod lock;
mod memory;
mod options;
mod orchestrator;
mod owner;
mod probe;
mod process;
mod queue;
mod release;
mod result;
mod room;
mod runs;
mod shared;
mod start;
mod store;
mod sys;
mod table;
mod views;
mod waiter;
mod worker;

pub use callables::PythonObject;
pub use options::{Noise, RetentionChoice, SimplerOptions, WorkerArgument};
pub use probe::RuntimeInfo;
pub use worker::SimplerBackend;
