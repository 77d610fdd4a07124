//! Forwarding for wrappers: a backend or an orchestrator around another one writes only the methods that it changes.

/// Writes the named methods of [`Backend`](crate::Backend) so that they call the same method of a field.
///
/// For the body of an `impl Backend`: name the field that holds the wrapped backend and the methods to forward. What is
/// not named is for the wrapper to write; the compiler says what is missing, since the trait has no default methods.
/// So a method that the trait gains later is never forwarded unseen.
///
/// `crates/pto-simpler-sys/examples/counting_backend.rs` wraps any backend with it.
#[macro_export]
macro_rules! forward_backend {
    ($inner:ident: $($method:ident),+ $(,)?) => { $($crate::forward_backend!(@ $inner $method);)+ };
    (@ $inner:ident capabilities) => {
        fn capabilities(&self) -> &$crate::Capabilities {
            self.$inner.capabilities()
        }
    };
    (@ $inner:ident phase) => {
        fn phase(&self) -> $crate::BackendPhase {
            self.$inner.phase()
        }
    };
    (@ $inner:ident check_blocking) => {
        fn check_blocking(&self) -> Result<(), $crate::BackendError> {
            self.$inner.check_blocking()
        }
    };
    (@ $inner:ident register) => {
        fn register(&self, callable: &$crate::CallableSpec) -> Result<$crate::Registered, $crate::BackendError> {
            self.$inner.register(callable)
        }
    };
    (@ $inner:ident start) => {
        fn start(
            &self,
            events: ::std::sync::Arc<dyn $crate::RunEvents>,
        ) -> Result<$crate::Negotiated, $crate::BackendError> {
            self.$inner.start(events)
        }
    };
    (@ $inner:ident submit) => {
        fn submit(
            &self,
            run: $crate::RunId,
            config: &$crate::CallConfig,
            graph: &mut dyn $crate::GraphBuilder,
        ) -> Result<(), $crate::SubmitError> {
            self.$inner.submit(run, config, graph)
        }
    };
    (@ $inner:ident run_state) => {
        fn run_state(&self, run: $crate::RunId) -> $crate::RunState {
            self.$inner.run_state(run)
        }
    };
    (@ $inner:ident create_buffer) => {
        fn create_buffer(&self, nbytes: u64) -> Result<$crate::HostBufferId, $crate::BackendError> {
            self.$inner.create_buffer(nbytes)
        }
    };
    (@ $inner:ident create_zeros) => {
        fn create_zeros(&self, nbytes: u64) -> Result<$crate::HostBufferId, $crate::BackendError> {
            self.$inner.create_zeros(nbytes)
        }
    };
    (@ $inner:ident write_buffer) => {
        fn write_buffer(
            &self,
            buffer: $crate::HostBufferId,
            offset: u64,
            bytes: &[u8],
        ) -> Result<(), $crate::BackendError> {
            self.$inner.write_buffer(buffer, offset, bytes)
        }
    };
    (@ $inner:ident read_buffer) => {
        fn read_buffer(
            &self,
            buffer: $crate::HostBufferId,
            offset: u64,
            bytes: &mut [u8],
        ) -> Result<(), $crate::BackendError> {
            self.$inner.read_buffer(buffer, offset, bytes)
        }
    };
    (@ $inner:ident fill_buffer) => {
        fn fill_buffer(&self, buffer: $crate::HostBufferId, byte: u8) -> Result<(), $crate::BackendError> {
            self.$inner.fill_buffer(buffer, byte)
        }
    };
    (@ $inner:ident release_buffer) => {
        fn release_buffer(&self, buffer: $crate::HostBufferId) -> Result<(), $crate::BackendError> {
            self.$inner.release_buffer(buffer)
        }
    };
    (@ $inner:ident alloc) => {
        fn alloc(&self, chip: $crate::ChipId, nbytes: u64) -> Result<$crate::DeviceBufferId, $crate::BackendError> {
            self.$inner.alloc(chip, nbytes)
        }
    };
    (@ $inner:ident free) => {
        fn free(&self, buffer: $crate::DeviceBufferId) -> Result<(), $crate::BackendError> {
            self.$inner.free(buffer)
        }
    };
    (@ $inner:ident copy_to) => {
        fn copy_to(&self, copy: &$crate::CopyTo) -> Result<(), $crate::BackendError> {
            self.$inner.copy_to(copy)
        }
    };
    (@ $inner:ident copy_from) => {
        fn copy_from(
            &self,
            dst: $crate::HostBufferId,
            src: $crate::DevicePlace,
            nbytes: u64,
        ) -> Result<(), $crate::BackendError> {
            self.$inner.copy_from(dst, src, nbytes)
        }
    };
    (@ $inner:ident release_domain) => {
        fn release_domain(&self, domain: $crate::DomainId) -> Result<(), $crate::BackendError> {
            self.$inner.release_domain(domain)
        }
    };
    (@ $inner:ident domain_state) => {
        fn domain_state(&self, domain: $crate::DomainId) -> Result<$crate::DomainState, $crate::BackendError> {
            self.$inner.domain_state(domain)
        }
    };
    (@ $inner:ident committed_device_memory) => {
        fn committed_device_memory(&self, chip: $crate::ChipId) -> Result<u64, $crate::BackendError> {
            self.$inner.committed_device_memory(chip)
        }
    };
    (@ $inner:ident close) => {
        fn close(&self) -> Result<(), $crate::BackendError> {
            self.$inner.close()
        }
    };
    (@ $inner:ident abandon) => {
        fn abandon(&self) -> $crate::AbandonReport {
            self.$inner.abandon()
        }
    };
}

/// Writes the named methods of [`Orchestrator`](crate::Orchestrator) so that they call the same method of a field, as
/// [`forward_backend!`](crate::forward_backend) does for backends.
#[macro_export]
macro_rules! forward_orchestrator {
    ($inner:ident: $($method:ident),+ $(,)?) => { $($crate::forward_orchestrator!(@ $inner $method);)+ };
    (@ $inner:ident run) => {
        fn run(&self) -> $crate::RunId {
            self.$inner.run()
        }
    };
    (@ $inner:ident allocate_domain) => {
        fn allocate_domain(
            &self,
            name: &str,
            request: &$crate::DomainRequest,
            reply: &mut $crate::DomainAllocation,
        ) -> Result<(), $crate::BackendError> {
            self.$inner.allocate_domain(name, request, reply)
        }
    };
    (@ $inner:ident get_or_allocate_domain) => {
        fn get_or_allocate_domain(
            &self,
            name: &str,
            request: &$crate::DomainRequest,
            retain_after_run: bool,
            reply: &mut $crate::DomainAllocation,
        ) -> Result<(), $crate::BackendError> {
            self.$inner.get_or_allocate_domain(name, request, retain_after_run, reply)
        }
    };
    (@ $inner:ident copy_to) => {
        fn copy_to(&self, copy: &$crate::CopyTo) -> Result<(), $crate::BackendError> {
            self.$inner.copy_to(copy)
        }
    };
    (@ $inner:ident copy_from) => {
        fn copy_from(
            &self,
            dst: $crate::HostBufferId,
            src: $crate::DevicePlace,
            nbytes: u64,
        ) -> Result<(), $crate::BackendError> {
            self.$inner.copy_from(dst, src, nbytes)
        }
    };
    (@ $inner:ident copy_batch) => {
        fn copy_batch(
            &self,
            copies: &[$crate::CopyTo],
            results: &mut Vec<$crate::CopyResult>,
        ) -> Result<(), $crate::BackendError> {
            self.$inner.copy_batch(copies, results)
        }
    };
    (@ $inner:ident submit_next_level) => {
        fn submit_next_level(
            &self,
            callable: $crate::CallableId,
            args: &$crate::TaskArgs,
            config: Option<&$crate::CallConfig>,
            worker: $crate::ChipId,
        ) -> Result<(), $crate::BackendError> {
            self.$inner.submit_next_level(callable, args, config, worker)
        }
    };
    (@ $inner:ident submit_next_level_group) => {
        fn submit_next_level_group(
            &self,
            callable: $crate::CallableId,
            args: &[$crate::TaskArgs],
            config: Option<&$crate::CallConfig>,
            workers: &[$crate::ChipId],
        ) -> Result<(), $crate::BackendError> {
            self.$inner.submit_next_level_group(callable, args, config, workers)
        }
    };
    (@ $inner:ident submit_sub) => {
        fn submit_sub(
            &self,
            callable: $crate::CallableId,
            args: &$crate::TaskArgs,
        ) -> Result<(), $crate::BackendError> {
            self.$inner.submit_sub(callable, args)
        }
    };
    (@ $inner:ident scope) => {
        fn scope(
            &self,
            body: &mut dyn FnMut() -> Result<(), $crate::BuildFailed>,
        ) -> Result<(), $crate::CallbackError> {
            self.$inner.scope(body)
        }
    };
    (@ $inner:ident alloc) => {
        fn alloc(&self, nbytes: u64) -> Result<$crate::ScratchId, $crate::BackendError> {
            self.$inner.alloc(nbytes)
        }
    };
    (@ $inner:ident run_entry) => {
        fn run_entry(
            &self,
            entry: $crate::CallableId,
            call: &$crate::EntryCall<'_>,
            host: &dyn $crate::EntryHost,
        ) -> Result<(), $crate::CallbackError> {
            self.$inner.run_entry(entry, call, host)
        }
    };
}
