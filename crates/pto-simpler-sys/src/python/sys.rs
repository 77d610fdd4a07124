//! Raw calls: one function per call of the runtime's public Python interface, with names interned and classes looked
//! up once. Functions take an attached token and return the exception as it is; they check nothing.

use pyo3::exceptions::PyAttributeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::args::{Access, DataType};
use crate::config::CallConfig;
use crate::request::{DomainRequest, NamedBuffer};

/// The runtime's classes and enumerators.
#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) worker: Py<PyAny>,
    task_args: Py<PyAny>,
    call_config: Py<PyAny>,
    buffer_spec: Py<PyAny>,
    data_types: Vec<Py<PyAny>>,
    tags: Vec<Py<PyAny>>,
    directions: Vec<Py<PyAny>>,
    chip_callable: Py<PyAny>,
    core_callable: Py<PyAny>,
    wrap_fork_inherited: Py<PyAny>,
    access_read: Py<PyAny>,
    access_read_write: Py<PyAny>,
    fork_shm: Py<PyAny>,
    /// Identity under which buffers made before the start are known to the chips.
    owner_id: Py<PyAny>,
    callback: Py<PyAny>,
    /// Whether the orchestrator has the public retention call.
    pub(crate) public_retention: bool,
}

const DATA_TYPES: [&str; 11] =
    ["FLOAT32", "FLOAT16", "INT32", "INT16", "INT8", "UINT8", "BFLOAT16", "INT64", "UINT64", "UINT16", "UINT32"];
const TAGS: [&str; 5] = ["INPUT", "OUTPUT", "INOUT", "OUTPUT_EXISTING", "NO_DEP"];
const DIRECTIONS: [&str; 3] = ["IN", "OUT", "INOUT"];

const fn data_type_index(dtype: DataType) -> usize {
    match dtype {
        DataType::Float32 => 0,
        DataType::Float16 => 1,
        DataType::Int32 => 2,
        DataType::Int16 => 3,
        DataType::Int8 => 4,
        DataType::Uint8 => 5,
        DataType::Bfloat16 => 6,
        DataType::Int64 => 7,
        DataType::Uint64 => 8,
        DataType::Uint16 => 9,
        DataType::Uint32 => 10,
    }
}

const fn tag_index(access: Access) -> usize {
    match access {
        Access::Input => 0,
        Access::Output => 1,
        Access::InOut => 2,
        Access::OutputExisting => 3,
        Access::NoDependency => 4,
    }
}

const fn direction_index(access: Access) -> usize {
    match access {
        Access::Input => 0,
        Access::Output | Access::OutputExisting => 1,
        Access::InOut | Access::NoDependency => 2,
    }
}

impl Api {
    /// Looks everything up; an error is that of the first name that is missing, with the module it was wanted from.
    pub(crate) fn load(py: Python<'_>) -> PyResult<Self> {
        let interface = py.import("simpler.task_interface")?;
        let worker = py.import("simpler.worker")?;
        let orchestrator = py.import("simpler.orchestrator")?;
        let buffer = py.import("simpler.buffer")?;
        let members = |module: &Bound<'_, PyModule>, class: &str, names: &[&str]| {
            let class = module.getattr(class)?;
            names.iter().map(|name| Ok(class.getattr(*name)?.unbind())).collect::<PyResult<Vec<_>>>()
        };
        let of = |module: &Bound<'_, PyModule>, name: &str| PyResult::Ok(module.getattr(name)?.unbind());
        let only = |module: &Bound<'_, PyModule>, class: &str, name: &str| {
            PyResult::Ok(module.getattr(class)?.getattr(name)?.unbind())
        };
        let class = worker.getattr("Worker")?;
        for method in
            ["register", "init", "submit", "close", "create_buffer", "release_buffer", "copy_to", "copy_from"]
                .into_iter()
                .chain(["alloc_child_tensor", "free", "committed_device_memory"])
        {
            class.getattr(method)?;
        }
        let orchestrator = orchestrator.getattr("Orchestrator")?;
        for method in ["allocate_domain", "submit_next_level", "submit_next_level_group", "submit_sub"]
            .into_iter()
            .chain(["copy_to", "copy_from", "alloc", "scope_begin", "scope_end"])
        {
            orchestrator.getattr(method)?;
        }
        Ok(Self {
            worker: class.unbind(),
            task_args: of(&interface, "TaskArgs")?,
            call_config: of(&interface, "CallConfig")?,
            buffer_spec: of(&interface, "CommBufferSpec")?,
            data_types: members(&interface, "DataType", &DATA_TYPES)?,
            tags: members(&interface, "TensorArgType", &TAGS)?,
            directions: members(&interface, "ArgDirection", &DIRECTIONS)?,
            chip_callable: of(&interface, "ChipCallable")?,
            core_callable: of(&interface, "CoreCallable")?,
            wrap_fork_inherited: of(&buffer, "wrap_fork_inherited")?,
            access_read: only(&buffer, "AccessMode", "READ")?,
            access_read_write: only(&buffer, "AccessMode", "READWRITE")?,
            fork_shm: only(&buffer, "BackendKind", "FORK_SHM")?,
            owner_id: buffer.getattr("mint_owner_instance_id")?.call0()?.unbind(),
            callback: Py::new(py, super::building::GraphCallback)?.into_any(),
            public_retention: orchestrator.hasattr("get_or_allocate_domain")?,
        })
    }

    // ---- Worker -----------------------------------------------------------------------------------------------

    pub(crate) fn worker_new<'py>(
        &self,
        py: Python<'py>,
        arguments: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.worker.bind(py).call((), Some(arguments))
    }

    pub(crate) fn register<'py>(
        &self,
        worker: &Bound<'py, PyAny>,
        target: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        worker.call_method1(intern!(worker.py(), "register"), (target,))
    }

    pub(crate) fn close(&self, worker: &Bound<'_, PyAny>) -> PyResult<()> {
        worker.call_method0(intern!(worker.py(), "close")).map(drop)
    }

    /// `Worker.submit` with the callback that runs this thread's innermost build; returns the run handle.
    pub(crate) fn submit<'py>(
        &self,
        worker: &Bound<'py, PyAny>,
        config: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = worker.py();
        worker.call_method1(intern!(py, "submit"), (self.callback.bind(py), py.None(), config))
    }

    /// `RunHandle.result()`: waits for the run, detached inside.
    pub(crate) fn result(&self, handle: &Bound<'_, PyAny>) -> PyResult<()> {
        handle.call_method0(intern!(handle.py(), "result")).map(drop)
    }

    pub(crate) fn create_buffer<'py>(
        &self,
        worker: &Bound<'py, PyAny>,
        nbytes: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        worker.call_method1(intern!(worker.py(), "create_buffer"), (nbytes,))
    }

    pub(crate) fn release_buffer(&self, worker: &Bound<'_, PyAny>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        worker.call_method1(intern!(worker.py(), "release_buffer"), (buffer,)).map(drop)
    }

    /// `Worker.alloc_child_tensor` of plain bytes.
    pub(crate) fn alloc_child<'py>(
        &self,
        worker: &Bound<'py, PyAny>,
        chip: u32,
        nbytes: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = worker.py();
        let bytes = &self.data_types[data_type_index(DataType::Uint8)];
        worker.call_method1(intern!(py, "alloc_child_tensor"), (chip, (nbytes,), bytes))
    }

    pub(crate) fn free(&self, worker: &Bound<'_, PyAny>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        worker.call_method1(intern!(worker.py(), "free"), (buffer,)).map(drop)
    }

    pub(crate) fn committed_device_memory(&self, worker: &Bound<'_, PyAny>, chip: u32) -> PyResult<u64> {
        worker.call_method1(intern!(worker.py(), "committed_device_memory"), (chip,))?.extract()
    }

    // ---- Worker and Orchestrator: the calls of the same name ----------------------------------------------------

    pub(crate) fn copy_to(
        &self,
        target: &Bound<'_, PyAny>,
        dst: &Bound<'_, PyAny>,
        src: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        target.call_method1(intern!(target.py(), "copy_to"), (dst, src)).map(drop)
    }

    pub(crate) fn copy_from(
        &self,
        target: &Bound<'_, PyAny>,
        dst: &Bound<'_, PyAny>,
        src: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        target.call_method1(intern!(target.py(), "copy_from"), (dst, src)).map(drop)
    }

    // ---- Orchestrator -----------------------------------------------------------------------------------------

    pub(crate) fn allocate_domain<'py>(
        &self,
        orchestrator: &Bound<'py, PyAny>,
        arguments: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        orchestrator.call_method(intern!(orchestrator.py(), "allocate_domain"), (), Some(arguments))
    }

    pub(crate) fn get_or_allocate_domain<'py>(
        &self,
        orchestrator: &Bound<'py, PyAny>,
        arguments: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        orchestrator.call_method(intern!(orchestrator.py(), "get_or_allocate_domain"), (), Some(arguments))
    }

    pub(crate) fn submit_next_level(
        &self,
        orchestrator: &Bound<'_, PyAny>,
        callable: &Bound<'_, PyAny>,
        args: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
        chip: u32,
    ) -> PyResult<()> {
        let py = orchestrator.py();
        let keyword = PyDict::new(py);
        keyword.set_item(intern!(py, "worker"), chip)?;
        orchestrator
            .call_method(intern!(py, "submit_next_level"), (callable, args, config), Some(&keyword))
            .map(drop)
    }

    pub(crate) fn submit_next_level_group(
        &self,
        orchestrator: &Bound<'_, PyAny>,
        callable: &Bound<'_, PyAny>,
        args: &Bound<'_, PyList>,
        config: &Bound<'_, PyAny>,
        chips: &Bound<'_, PyList>,
    ) -> PyResult<()> {
        let py = orchestrator.py();
        let keyword = PyDict::new(py);
        keyword.set_item(intern!(py, "workers"), chips)?;
        orchestrator
            .call_method(intern!(py, "submit_next_level_group"), (callable, args, config), Some(&keyword))
            .map(drop)
    }

    pub(crate) fn submit_sub(
        &self,
        orchestrator: &Bound<'_, PyAny>,
        callable: &Bound<'_, PyAny>,
        args: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        orchestrator.call_method1(intern!(orchestrator.py(), "submit_sub"), (callable, args)).map(drop)
    }

    /// `Orchestrator.alloc` of plain bytes.
    pub(crate) fn alloc<'py>(&self, orchestrator: &Bound<'py, PyAny>, nbytes: u32) -> PyResult<Bound<'py, PyAny>> {
        let bytes = &self.data_types[data_type_index(DataType::Uint8)];
        orchestrator.call_method1(intern!(orchestrator.py(), "alloc"), ((nbytes,), bytes))
    }

    pub(crate) fn scope_begin(&self, orchestrator: &Bound<'_, PyAny>) -> PyResult<()> {
        orchestrator.call_method0(intern!(orchestrator.py(), "scope_begin")).map(drop)
    }

    pub(crate) fn scope_end(&self, orchestrator: &Bound<'_, PyAny>) -> PyResult<()> {
        orchestrator.call_method0(intern!(orchestrator.py(), "scope_end")).map(drop)
    }

    // ---- Values -----------------------------------------------------------------------------------------------

    /// `Buffer.tensor(shapes, dtype, None, byte_offset)`.
    pub(crate) fn tensor<'py>(
        &self,
        buffer: &Bound<'py, PyAny>,
        shape: &[u32],
        dtype: DataType,
        byte_offset: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = buffer.py();
        let shape = PyTuple::new(py, shape)?;
        let dtype = &self.data_types[data_type_index(dtype)];
        buffer.call_method1(intern!(py, "tensor"), (shape, dtype, py.None(), byte_offset))
    }

    pub(crate) fn data_type<'py>(&self, py: Python<'py>, dtype: DataType) -> &Bound<'py, PyAny> {
        self.data_types[data_type_index(dtype)].bind(py)
    }

    pub(crate) fn task_args<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.task_args.bind(py).call0()
    }

    pub(crate) fn add_tensor(
        &self,
        args: &Bound<'_, PyAny>,
        tensor: &Bound<'_, PyAny>,
        access: Access,
    ) -> PyResult<()> {
        args.call_method1(intern!(args.py(), "add_tensor"), (tensor, &self.tags[tag_index(access)])).map(drop)
    }

    pub(crate) fn add_scalar(&self, args: &Bound<'_, PyAny>, scalar: u64) -> PyResult<()> {
        args.call_method1(intern!(args.py(), "add_scalar"), (scalar,)).map(drop)
    }

    pub(crate) fn call_config<'py>(&self, py: Python<'py>, config: &CallConfig) -> PyResult<Bound<'py, PyAny>> {
        let object = self.call_config.bind(py).call0()?;
        if *config == CallConfig::default() {
            return Ok(object);
        }
        object.setattr(intern!(py, "aicpu_thread_num"), config.aicpu_threads)?;
        let rings = object.getattr(intern!(py, "runtime_env"))?;
        for (name, values) in [
            (intern!(py, "ring_task_window"), &config.ring_task_window),
            (intern!(py, "ring_heap"), &config.ring_heap),
            (intern!(py, "ring_dep_pool"), &config.ring_dep_pool),
        ] {
            if let Some(values) = values {
                rings.setattr(name, PyList::new(py, values)?)?;
            }
        }
        if let Some(prefix) = &config.output_prefix {
            object.setattr(intern!(py, "output_prefix"), &**prefix)?;
        }
        if config.swimlane {
            object.setattr(intern!(py, "enable_chip_swimlane"), true)?;
        }
        Ok(object)
    }

    /// `CommBufferSpec(name, dtype, count, nbytes)` of each buffer.
    fn buffer_specs<'py>(&self, py: Python<'py>, buffers: &[NamedBuffer]) -> PyResult<Bound<'py, PyList>> {
        let specs = PyList::empty(py);
        for b in buffers {
            specs.append(self.buffer_spec.bind(py).call1((&*b.name, &*b.dtype, b.count, b.nbytes))?)?;
        }
        Ok(specs)
    }

    /// The keyword arguments of an allocation.
    pub(crate) fn domain_arguments<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        request: &DomainRequest,
    ) -> PyResult<Bound<'py, PyDict>> {
        let arguments = PyDict::new(py);
        arguments.set_item(intern!(py, "name"), name)?;
        arguments.set_item(intern!(py, "workers"), PyList::new(py, request.workers.iter().map(|w| w.0))?)?;
        arguments.set_item(intern!(py, "window_size"), request.window_bytes)?;
        arguments.set_item(intern!(py, "buffers"), self.buffer_specs(py, &request.buffers)?)?;
        Ok(arguments)
    }

    /// `wrap_fork_inherited`: shared memory that exists at `address` in this process and, once forked, in the chips'.
    pub(crate) fn wrap_inherited<'py>(
        &self,
        py: Python<'py>,
        address: u64,
        nbytes: u64,
        number: u64,
        writable: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let arguments = PyDict::new(py);
        arguments.set_item("access", if writable { &self.access_read_write } else { &self.access_read })?;
        arguments.set_item("backend_kind", &self.fork_shm)?;
        self.wrap_fork_inherited.bind(py).call((address, nbytes, &self.owner_id, number), Some(&arguments))
    }

    /// Makes a buffer of the runtime read-only for tasks and copies; before anything was derived from it.
    pub(crate) fn make_read_only(&self, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        buffer.setattr(intern!(buffer.py(), "access"), &self.access_read)
    }

    /// `ChipCallable.build` from the bytes of its parts.
    pub(crate) fn chip_callable<'py>(
        &self,
        py: Python<'py>,
        signature: &[Access],
        function: &str,
        config_function: Option<&str>,
        orchestration: &[u8],
        kernels: &[(u32, Vec<Access>, Vec<u8>)],
    ) -> PyResult<Bound<'py, PyAny>> {
        let children = PyList::empty(py);
        for (id, signature, binary) in kernels {
            let arguments = PyDict::new(py);
            arguments.set_item("signature", self.signature(py, signature)?)?;
            arguments.set_item("binary", PyBytes::new(py, binary))?;
            let kernel = self.core_callable.bind(py).call_method("build", (), Some(&arguments))?;
            children.append((id, kernel))?;
        }
        let arguments = PyDict::new(py);
        arguments.set_item("signature", self.signature(py, signature)?)?;
        arguments.set_item("func_name", function)?;
        arguments.set_item("binary", PyBytes::new(py, orchestration))?;
        arguments.set_item("children", children)?;
        if let Some(name) = config_function {
            arguments.set_item("config_name", name)?;
        }
        self.chip_callable.bind(py).call_method("build", (), Some(&arguments))
    }

    fn signature<'py>(&self, py: Python<'py>, accesses: &[Access]) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, accesses.iter().map(|a| &self.directions[direction_index(*a)]))
    }
}

/// An attribute that may be missing.
pub(crate) fn optional<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    match object.getattr(name) {
        Ok(value) => Ok((!value.is_none()).then_some(value)),
        Err(e) if e.is_instance_of::<PyAttributeError>(object.py()) => Ok(None),
        Err(e) => Err(e),
    }
}
