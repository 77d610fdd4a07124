//! Start, close, abandon, drop; faults in each of them; and many threads at once.
#![allow(clippy::unwrap_used, clippy::panic, clippy::clone_on_ref_ptr, reason = "this is test code")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use pto_mock::{
    Completion, Emulator, EventKind, Fault, FaultEffect, FreeCause, KernelError, KernelObject, Memory, WaitFor,
};
use pto_simpler_sys::*;

#[test]
fn calls_in_the_wrong_state_say_which_state_it_is() {
    let emulator = kernels(builder()).build().unwrap();
    for (error, text) in [
        (submit(&*emulator, 1, |_| Ok(())), "New"),
        (emulator.alloc(ChipId(0), 1).map(|_| ()), "New"),
        (emulator.committed_device_memory(ChipId(0)).map(|_| ()), "New"),
    ] {
        let error = error.unwrap_err();
        assert!(error.family() == Family::Misuse && error.to_string().contains(text), "{error}");
    }
    let early = emulator.create_buffer(4).unwrap();
    emulator.start(Arc::new(Ends::default())).unwrap();
    assert!(emulator.start(Arc::new(Ends::default())).is_err());
    emulator.release_buffer(early).unwrap();
    emulator.close().unwrap();
    assert_eq!(emulator.close(), Ok(()));
    for error in [
        submit(&*emulator, 1, |_| Ok(())),
        emulator.create_buffer(4).map(|_| ()),
        emulator.register(&chip_spec("nothing", &[], 0)).map(|_| ()),
        emulator.start(Arc::new(Ends::default())).map(|_| ()),
    ] {
        assert!(error.unwrap_err().to_string().contains("Closed"));
    }
    assert_eq!(emulator.abandon(), AbandonReport::default());
}

#[test]
fn close_in_new_is_ok_and_frees_buffers() {
    let emulator = builder().build().unwrap();
    emulator.create_buffer(4).unwrap();
    emulator.close().unwrap();
    assert_eq!(emulator.stats().host_buffers, 0);
}

#[test]
fn s11_a_failed_start_is_rolled_back_and_only_close_is_left() {
    for text in
        ["start#1:before", "start#1:after", "start#1:no-reply", "start@chip1#1:before", "start@chip0#1:after"]
    {
        let emulator = builder().faults(text.parse().unwrap()).build().unwrap();
        let error = emulator.start(Arc::new(Ends::default())).unwrap_err();
        assert_eq!(error.family(), Family::Backend, "{text}");
        assert_eq!(emulator.stats().threads, 0, "{text}");
        assert!(emulator.start(Arc::new(Ends::default())).unwrap_err().to_string().contains("Failed"));
        assert_eq!(emulator.close(), Ok(()));
    }
}

#[test]
fn register_checks_names_kinds_sources_signatures_and_the_limit() {
    let mut limits = Limits::default();
    limits.callables = 2;
    let emulator = kernels(builder()).limits(limits).build().unwrap();
    let foreign = CallableSource::Object(Arc::new(5_u32));
    let import = CallableSource::Import { module: "m".into(), attribute: "f".into() };
    for (spec, text) in [
        (chip_spec("absent", &[], 0), "absent"),
        (chip_spec("nothing", &[], 1), "registered with"),
        (CallableSpec::sub("nothing", Signature::default()), "Sub"),
        (chip_spec("x", &[], 0).with_source(foreign), "KernelObject"),
        (chip_spec("x", &[], 0).with_source(import), "closures"),
        (chip_spec("x", &[], 0).with_source(KernelObject::sub(|_| Ok(())).into_source()), "agree on one"),
        (
            CallableSpec {
                signature: None,
                ..chip_spec("x", &[], 0).with_source(KernelObject::new(|_| Ok(())).into_source())
            },
            "no signature",
        ),
    ] {
        let error = emulator.register(&spec).unwrap_err();
        assert!(error.family() == Family::Misuse && error.to_string().contains(text), "{error}");
    }
    let twice = [(); 2].map(|()| emulator.register(&chip_spec("nothing", &[], 0)).unwrap().id);
    assert_ne!(twice[0], twice[1], "equal content twice gives two ids");
    let full = emulator.register(&chip_spec("nothing", &[], 0)).unwrap_err();
    assert!(full.to_string().contains("2 of 2"), "{full}");
}

#[test]
fn tasks_are_checked_before_anything_is_queued() {
    let mut limits = Limits::default();
    limits.scalars = 2;
    limits.tensors = 2;
    limits.argument_bytes = 16 + 2 * 128;
    let rig = Rig::new(builder().limits(limits));
    let register = |name: &str, tensors: &[Access], scalars| {
        let source = KernelObject::new(|_| Ok(())).into_source();
        rig.emulator.register(&chip_spec(name, tensors, scalars).with_source(source)).unwrap().id
    };
    let one = register("one", &[Access::Input], 0);
    let sub = {
        let source = KernelObject::sub(|_| Ok(())).into_source();
        let spec = CallableSpec::sub("sub", Signature::new([Access::Input], 0)).with_source(source);
        rig.emulator.register(&spec).unwrap().id
    };
    let domain = rig.retained(1, "d", &signal());
    let host = rig.emulator.create_buffer(16).unwrap();
    let device = rig.emulator.alloc(ChipId(1), 16).unwrap();
    let tensor = |place, dims: &[u32], dtype, byte_offset| TensorArg {
        place,
        shape: Shape::new(dims).unwrap(),
        dtype,
        byte_offset,
        access: Access::Input,
    };
    let args = |tensor: TensorArg| {
        let mut args = TaskArgs::new();
        args.tensor(tensor);
        args
    };
    let place = |chip| TensorPlace::DomainBuffer { domain: domain.id().unwrap(), chip: ChipId(chip), buffer: 0 };
    let on_host = |dims: &[u32], offset| args(tensor(TensorPlace::Host(host), dims, DataType::Int32, offset));
    let mut many = TaskArgs::new();
    many.scalar(0).scalar(0).scalar(0);
    let mut wide = TaskArgs::new();
    (0..3).for_each(|_| {
        wide.tensor(tensor(TensorPlace::Host(host), &[1], DataType::Int8, 0));
    });
    let mut heavy = on_host(&[1], 0);
    heavy.tensor(tensor(TensorPlace::Host(host), &[1], DataType::Int8, 0)).scalar(1);
    let outcome = rig.run(2, |o| {
        let chip = |id, args: &TaskArgs, chip| o.submit_next_level(id, args, None, ChipId(chip)).unwrap_err();
        let group = |args: &[TaskArgs], chips: &[ChipId]| {
            o.submit_next_level_group(rig.nothing, args, None, chips).unwrap_err()
        };
        let empty = TaskArgs::new();
        let scratch = o.alloc(4)?;
        assert!(o.alloc(0).is_err());
        for (error, text) in [
            (chip(CallableId::new(9, 0), &empty, 0), "not registered"),
            (chip(sub, &on_host(&[1], 0), 0), "Sub callable"),
            (chip(rig.nothing, &empty, 2), "not a registered worker"),
            (chip(one, &empty, 0), "takes 1 tensors and 0 scalars"),
            (chip(one, &many, 0), "at most 2"),
            (chip(one, &wide, 0), "at most 2"),
            (chip(one, &heavy, 0), "at most 272"),
            (chip(one, &on_host(&[5], 0), 0), "spans 20 bytes"),
            (chip(one, &on_host(&[1], 2), 0), "multiple of 4"),
            (chip(one, &on_host(&[1], 16), 0), "has 16 bytes"),
            (chip(one, &on_host(&[u32::MAX; 3], 0), 0), "64 bits"),
            (chip(one, &args(tensor(place(1), &[1], DataType::Int8, 0)), 0), "lives on chip1"),
            (chip(one, &args(tensor(TensorPlace::Resident(device), &[1], DataType::Int8, 0)), 0), "lives on chip1"),
            (
                chip(one, &args(tensor(TensorPlace::Host(HostBufferId::new(9, 0)), &[1], DataType::Int8, 0)), 0),
                "never created",
            ),
            (
                chip(one, &args(tensor(TensorPlace::Scratch(ScratchId::new(9, 9)), &[1], DataType::Int8, 0)), 0),
                "no scratch of this run",
            ),
            (o.submit_sub(sub, &args(tensor(place(0), &[1], DataType::Int8, 0))).unwrap_err(), "lives on a device"),
            (group(&[], &[]), "at least 1"),
            (group(std::slice::from_ref(&empty), &[ChipId(0), ChipId(1)]), "1 argument lists for 2 workers"),
            (group(&[empty.clone(), empty.clone()], &[ChipId(0), ChipId(0)]), "duplicates"),
        ] {
            assert!(error.family() == Family::Misuse && error.to_string().contains(text), "{error} / {text}");
        }
        // None of these counts as a task.
        o.copy_to(&copy(buffer(&domain, 0, 0), host, 16))?;
        o.submit_sub(sub, &args(tensor(TensorPlace::Scratch(scratch), &[1], DataType::Int32, 0)))?;
        o.submit_next_level(one, &args(tensor(place(1), &[16], DataType::Int32, 0)), None, ChipId(1))
    });
    assert_eq!(outcome.unwrap(), RunOutcome::success());
    assert_eq!(rig.emulator.journal().count(|e| matches!(e, EventKind::TaskSubmit { .. })), 2);
    rig.close();
}

#[test]
fn an_input_tensor_and_a_buffer_of_zeros_cannot_be_written() {
    let rig = Rig::two();
    let write = |name: &str, access| {
        let source = KernelObject::new(|k| {
            assert_eq!(k.tensor(0)?.cell(0)?.store(1), k.tensor(0)?.store(0, &[1]));
            k.tensor(0)?.store(0, &[1])
        });
        let spec = chip_spec(name, &[access], 0).with_source(source.into_source());
        rig.emulator.register(&spec).unwrap().id
    };
    let (input, output) = (write("input", Access::Input), write("output", Access::Output));
    let (host, zeros) = (rig.emulator.create_buffer(4).unwrap(), rig.emulator.create_zeros(4).unwrap());
    for (run, kernel, host, access, ok) in [
        (1, input, host, Access::Input, false),
        (2, output, zeros, Access::Output, false),
        (3, output, host, Access::Output, true),
    ] {
        let mut args = TaskArgs::new();
        args.tensor(TensorArg {
            place: TensorPlace::Host(host),
            shape: Shape::new(&[1]).unwrap(),
            dtype: DataType::Int32,
            byte_offset: 0,
            access,
        });
        let outcome = rig.run(run, |o| o.submit_next_level(kernel, &args, None, ChipId(0))).unwrap();
        assert_eq!(outcome.result.is_ok(), ok, "{outcome:?}");
    }
    rig.close();
}

#[test]
fn scopes_nest_to_the_limit_and_report_their_body() {
    let mut limits = Limits::default();
    limits.scope_depth = 2;
    let rig = Rig::new(builder().limits(limits));
    rig.run(1, |o| {
        let mut deepest = None;
        let outer = o.scope(&mut || {
            let inner = o.scope(&mut || {
                deepest = o.scope(&mut || Ok(())).err();
                Ok(())
            });
            assert_eq!(inner, Ok(()));
            Err(BuildFailed)
        });
        assert_eq!(outer, Err(CallbackError::Build(BuildFailed)));
        assert!(matches!(deepest, Some(CallbackError::Backend(e)) if e.family() == Family::Misuse));
        assert_eq!(o.scope(&mut || Ok(())), Ok(()), "a closed scope makes room");
        Ok(())
    })
    .unwrap();
    rig.close();
}

#[test]
fn entries_see_their_arguments_and_build_through_their_host() {
    struct Host<'a>(&'a dyn Orchestrator, AtomicBool);
    impl EntryHost for Host<'_> {
        fn open(&self, _task: bool) -> Result<(), BuildFailed> {
            self.1.store(true, Ordering::SeqCst);
            Ok(())
        }

        fn retains(&self) -> bool {
            false
        }
        fn domain(
            &self,
            name: &str,
            request: &DomainRequest,
            reply: &mut DomainAllocation,
        ) -> Result<(), BuildFailed> {
            self.0.get_or_allocate_domain(name, request, true, reply).map_err(|_| BuildFailed)
        }
    }
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let emulator = kernels(builder())
        .entry("decode", move |e| {
            let mut reply = DomainAllocation::new();
            e.host().domain("d", &signal(), &mut reply)?;
            e.host().open(true)?;
            let Some(EntryValue::Scalar(step)) = e.arg("step") else {
                return Err(BackendError::misuse(Call::RunEntry, "no step").into());
            };
            assert_eq!(e.config().output_prefix.as_deref(), Some("out"));
            log.lock().unwrap().push((*step, e.frame(), e.args().len(), e.orchestrator().run()));
            Ok(())
        })
        .entry("broken", |_| panic!("entry panic on purpose"))
        .build()
        .unwrap();
    assert!(emulator.capabilities().entries);
    let entry = |name: &str| CallableSpec {
        name: name.into(),
        kind: CallableKind::Entry,
        signature: None,
        source: CallableSource::Named,
    };
    let decode = emulator.register(&entry("decode")).unwrap();
    assert!(decode.takes_domains);
    let broken = emulator.register(&entry("broken")).unwrap();
    let old = KernelObject::entry_without_domains(|_| Ok(())).into_source();
    assert!(!emulator.register(&entry("old").with_source(old)).unwrap().takes_domains);
    emulator.start(Arc::new(Ends::default())).unwrap();
    submit(&*emulator, 5, |o| {
        let host = Host(o, AtomicBool::new(false));
        let mut config = CallConfig::default();
        config.output_prefix = Some("out".into());
        let args = [EntryArg { name: "step".into(), value: EntryValue::Scalar(9) }];
        let call = EntryCall { args: &args, config: &config, frame: 3 };
        o.run_entry(decode.id, &call, &host).unwrap();
        assert!(host.1.load(Ordering::SeqCst));
        let none = EntryCall { args: &[], config: &config, frame: 0 };
        assert!(matches!(o.run_entry(decode.id, &none, &host), Err(CallbackError::Backend(_))));
        let Err(CallbackError::Backend(error)) = o.run_entry(broken.id, &none, &host) else {
            panic!("a panicking entry is a failure")
        };
        assert!(error.to_string().contains("entry panic on purpose"));
        Ok(())
    })
    .unwrap();
    assert_eq!(*seen.lock().unwrap(), [(9, 3, 1, RunId(5))]);
    emulator.close().unwrap();
}

#[test]
fn sub_tasks_run_on_their_own_threads_and_share_host_memory() {
    let emulator = kernels(builder())
        .sub_workers(2)
        .sub("add", Signature::new([Access::InOut], 1), |s| {
            let amount = i32::try_from(s.scalar(0)?).map_err(|_| KernelError::failed("too large"))?;
            s.tensor(0)?.cell(0)?.fetch_add(amount).map(|_| ())
        })
        .build()
        .unwrap();
    let add = emulator.register(&CallableSpec::sub("add", Signature::new([Access::InOut], 1))).unwrap().id;
    let ends = Arc::new(Ends::default());
    emulator.start(ends.clone()).unwrap();
    let host = emulator.create_buffer(4).unwrap();
    submit(&*emulator, 1, |o| {
        let mut args = TaskArgs::new();
        args.tensor(TensorArg {
            place: TensorPlace::Host(host),
            shape: Shape::new(&[1]).unwrap(),
            dtype: DataType::Int32,
            byte_offset: 0,
            access: Access::InOut,
        });
        args.scalar(3);
        (0..20).try_for_each(|_| o.submit_sub(add, &args))
    })
    .unwrap();
    assert_eq!(ends.wait(RunId(1)), RunOutcome::success());
    let mut bytes = [0; 4];
    emulator.read_buffer(host, 0, &mut bytes).unwrap();
    assert_eq!(i32::from_ne_bytes(bytes), 60);
    emulator.close().unwrap();
}

#[test]
fn s01_close_waits_for_runs_then_sweeps_in_reverse_order() {
    let rig = Rig::two();
    let ids: Vec<DomainId> =
        (1..=3).map(|run| rig.retained(run, &format!("d{run}"), &signal()).id().unwrap()).collect();
    rig.emulator.set_completion(Completion::ByHand);
    rig.submit(4, |_| Ok(())).unwrap();
    std::thread::scope(|scope| {
        let close = scope.spawn(|| rig.emulator.close());
        rig.emulator.wait_until(|events| events.iter().any(|e| e.kind == EventKind::CloseBegin));
        assert!(!rig.emulator.journal().contains(|e| matches!(e, EventKind::Free { .. })));
        rig.emulator.complete(RunId(4)).unwrap();
        close.join().unwrap().unwrap();
    });
    let freed: Vec<_> = rig
        .emulator
        .journal()
        .select(|e| matches!(e, EventKind::Free { cause: FreeCause::Sweep, .. }))
        .into_iter()
        .filter_map(|e| if let EventKind::Free { domain, .. } = e { Some(domain) } else { None })
        .collect();
    assert_eq!(freed, [ids[2], ids[1], ids[0]]);
    let journal = rig.emulator.journal();
    assert!(journal.before(|e| *e == EventKind::Ended(RunId(4), true), |e| matches!(e, EventKind::Free { .. })));
    for id in ids {
        assert_eq!(rig.emulator.domain_state(id), Ok(DomainState::Freed));
        assert_eq!(rig.emulator.release_domain(id), Ok(()));
    }
    rig.close();
}

#[test]
fn s03_a_failed_close_is_retried_and_two_closers_get_one_outcome() {
    for (text, second) in [
        ("close#1:before", Ok(())),
        ("close@chip1#1:before", Ok(())),
        ("close#1:after", Ok(())),
        ("close@chip0#1:no-reply", Ok(())),
    ] {
        let rig = Rig::new(builder().faults(text.parse().unwrap()));
        rig.retained(1, "d", &signal());
        assert!(rig.emulator.close().is_err(), "{text}");
        assert!(rig.submit(2, |_| Ok(())).is_err());
        assert_eq!(rig.emulator.close(), second, "{text}");
        assert_eq!(rig.emulator.journal().frees(), if text == "close@chip1#1:before" { 2 } else { 1 }, "{text}");
        rig.close();
    }
    let rig = Rig::new(builder().faults("close#1:hang; close#1:before".parse().unwrap()));
    std::thread::scope(|scope| {
        let closers = [(); 2].map(|()| scope.spawn(|| rig.emulator.close()));
        rig.emulator.faults().wait_hung(1);
        rig.emulator.release_hangs();
        let outcomes = closers.map(|closer| closer.join().unwrap());
        assert_eq!(outcomes[0], outcomes[1]);
    });
    rig.close();
}

#[test]
fn a_third_submission_that_waits_when_close_begins_is_admitted_and_drained() {
    let rig = Rig::new(builder().depth(1).completion(Completion::ByHand));
    rig.submit(1, |_| Ok(())).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| rig.submit(2, |_| Ok(())));
        rig.emulator.wait_until(|events| {
            events.iter().any(|e| e.kind == EventKind::Wait { run: RunId(2), on: WaitFor::Depth })
        });
        let close = scope.spawn(|| rig.emulator.close());
        rig.emulator.wait_until(|events| events.iter().any(|e| e.kind == EventKind::CloseBegin));
        rig.emulator.set_completion(Completion::Free);
        rig.emulator.complete(RunId(1)).unwrap();
        second.join().unwrap().unwrap();
        close.join().unwrap().unwrap();
    });
    assert_eq!(rig.ends.all().len(), 2);
    rig.close();
}

#[test]
fn abandon_interrupts_kernels_hangs_held_runs_and_waiting_submitters() {
    let rig = Rig::new(builder().completion(Completion::ByHand).faults("task@chip1#1:hang".parse().unwrap()));
    let mut reply = DomainAllocation::new();
    rig.submit(1, |o| o.get_or_allocate_domain("d", &signal(), true, &mut reply)).unwrap();
    rig.emulator.complete(RunId(1)).unwrap();
    rig.wait(1);
    rig.submit(2, |o| {
        o.submit_next_level(rig.waits, &context(&reply, 0), None, ChipId(0))?;
        o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(1))
    })
    .unwrap();
    rig.submit(3, |o| o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(0))).unwrap();
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| rig.submit(4, |_| unreachable!("never admitted")));
        rig.emulator.wait_until(|events| {
            let waits = events.iter().any(|e| e.kind == EventKind::Wait { run: RunId(4), on: WaitFor::Depth });
            let started = events.iter().filter(|e| matches!(e.kind, EventKind::TaskStart { .. })).count();
            waits && started == 2
        });
        rig.emulator.faults().wait_hung(1);
        let report = rig.emulator.abandon();
        assert_eq!(report.ended, [ChipId(0), ChipId(1)]);
        assert_eq!(report.left, Vec::<String>::new());
        assert!(blocked.join().unwrap().unwrap_err().must_reprepare());
    });
    for run in [2, 3] {
        assert!(rig.wait(run).result.unwrap_err().must_reprepare());
    }
    assert_eq!(rig.ends.all().len(), 3);
    assert_eq!(rig.emulator.domain_state(reply.id().unwrap()), Ok(DomainState::Freed));
    assert!(!rig.emulator.wait_accepted(RunId(4)));
    rig.close();
}

#[test]
fn abandon_leaves_a_kernel_that_never_returns_and_names_it() {
    let (stuck, resume) = mpsc::channel::<()>();
    let resume = Mutex::new(resume);
    let (arrived, inside) = mpsc::channel::<()>();
    let emulator = kernels(builder())
        .abandon_grace(Duration::from_millis(20))
        .kernel("stuck", Signature::new([], 1), move |k| {
            let view = k.domain(k.scalar(0)?)?.window(0)?;
            arrived.send(()).unwrap();
            let _ = resume.lock().unwrap().recv();
            // The memory is still there for a view that outlived its domain, but it may not be touched.
            view.store(0, &[1])
        })
        .build()
        .unwrap();
    let kernel = emulator.register(&chip_spec("stuck", &[], 1)).unwrap().id;
    let ends = Arc::new(Ends::default());
    emulator.start(ends.clone()).unwrap();
    let mut reply = DomainAllocation::new();
    submit(&*emulator, 1, |o| {
        o.allocate_domain("d", &signal(), &mut reply)?;
        o.submit_next_level(kernel, &context(&reply, 0), None, ChipId(0))
    })
    .unwrap();
    inside.recv().unwrap();
    let report = emulator.abandon();
    assert_eq!(report.ended, [ChipId(0)]);
    assert!(report.left.len() == 1 && report.left[0].contains("\"stuck\" of run1"), "{report:?}");
    assert!(ends.wait(RunId(1)).result.is_err());
    assert_eq!(emulator.close(), Ok(()));
    assert_eq!(emulator.stats().threads, 1);
    stuck.send(()).unwrap();
    emulator.wait_until(|events| events.iter().any(|e| matches!(e.kind, EventKind::TaskEnd { ok: false, .. })));
}

#[test]
fn dropping_an_open_emulator_ends_its_runs_once_and_its_threads() {
    let rig = Rig::new(builder().completion(Completion::ByHand));
    rig.submit(1, |_| Ok(())).unwrap();
    let Rig { emulator, ends, .. } = rig;
    drop(emulator);
    assert!(ends.wait(RunId(1)).result.is_err());
    assert_eq!(ends.all().len(), 1);
}

#[test]
fn an_emulator_can_be_dropped_by_the_receiver_of_its_last_end() {
    struct Last(Mutex<Option<Arc<Emulator>>>, Mutex<mpsc::Sender<()>>);
    impl RunEvents for Last {
        fn ended(&self, _: RunId, _: RunOutcome) {
            drop(self.0.lock().unwrap().take());
            self.1.lock().unwrap().send(()).unwrap();
        }
    }
    let emulator = builder().completion(Completion::ByHand).build().unwrap();
    let (sender, done) = mpsc::channel();
    let last = Arc::new(Last(Mutex::new(Some(emulator.clone())), Mutex::new(sender)));
    emulator.start(last).unwrap();
    submit(&*emulator, 1, |_| Ok(())).unwrap();
    emulator.complete(RunId(1)).unwrap();
    drop(emulator);
    done.recv().unwrap();
}

#[test]
fn the_receiver_of_ends_may_release_and_a_panicking_one_stops_nothing() {
    struct Receiver(Mutex<Option<(Arc<Emulator>, HostBufferId)>>, Ends);
    impl RunEvents for Receiver {
        fn ended(&self, run: RunId, outcome: RunOutcome) {
            if let Some((emulator, buffer)) = self.0.lock().unwrap().take() {
                assert_eq!(emulator.run_state(run), RunState::Ended);
                emulator.release_buffer(buffer).unwrap();
                assert!(emulator.close().unwrap_err().to_string().contains("thread of the emulator"));
            }
            self.1.ended(run, outcome);
            panic!("receiver panic on purpose");
        }
    }
    let emulator = builder().build().unwrap();
    let buffer = emulator.create_buffer(8).unwrap();
    let receiver = Arc::new(Receiver(Mutex::new(Some((emulator.clone(), buffer))), Ends::default()));
    emulator.start(receiver.clone()).unwrap();
    for run in 1..=2 {
        submit(&*emulator, run, |_| Ok(())).unwrap();
        assert_eq!(receiver.1.wait(RunId(run)), RunOutcome::success());
    }
    assert_eq!(emulator.stats().host_buffers, 0);
    emulator.close().unwrap();
}

/// Every fault that can hit a call of a small program, with every effect: each call ends, the worker closes or is
/// abandoned, and nothing is left.
#[test]
fn every_fault_at_every_call_leaves_nothing() {
    let chips = [None, Some(0), Some(1)];
    for (call, _) in pto_mock::CALLS {
        for chip in chips {
            for effect in FaultEffect::ALL {
                let mut fault = Fault::new(call, effect);
                fault.chip = chip.map(ChipId);
                one_fault(fault);
            }
        }
    }
}

fn one_fault(fault: Fault) {
    let emulator = kernels(builder()).faults(fault.into()).build().unwrap();
    let ends = Arc::new(Ends::default());
    std::thread::scope(|scope| {
        let (finished, over) = mpsc::channel::<()>();
        let faults = emulator.faults();
        if fault.effect == FaultEffect::Hang {
            // Lets every call that hangs go on, until the program is over.
            scope.spawn(move || {
                while over
                    .recv_timeout(Duration::from_millis(1))
                    .is_err_and(|e| e == mpsc::RecvTimeoutError::Timeout)
                {
                    faults.release_all();
                }
            });
        }
        let program = || -> Result<(), BackendError> {
            let nothing = emulator.register(&chip_spec("nothing", &[], 0))?.id;
            emulator.start(ends.clone())?;
            let host = emulator.create_buffer(64)?;
            emulator.write_buffer(host, 0, &[1])?;
            emulator.fill_buffer(host, 0)?;
            emulator.read_buffer(host, 0, &mut [0])?;
            let device = emulator.alloc(ChipId(1), 64)?;
            emulator.copy_to(&copy(DevicePlace::Resident(device), host, 64))?;
            emulator.copy_from(host, DevicePlace::Resident(device), 64)?;
            let mut kept = DomainAllocation::new();
            for run in 1..=2 {
                submit(&*emulator, run, |o| {
                    o.get_or_allocate_domain("kept", &signal(), true, &mut kept)?;
                    let mut own = DomainAllocation::new();
                    o.allocate_domain("own", &signal(), &mut own)?;
                    let mut results = Vec::new();
                    o.copy_batch(&[0, 1].map(|chip| copy(buffer(&kept, chip, 0), host, 64)), &mut results)?;
                    o.alloc(8)?;
                    o.submit_next_level(nothing, &TaskArgs::new(), None, ChipId(1))?;
                    let args = [TaskArgs::new(), TaskArgs::new()];
                    o.submit_next_level_group(nothing, &args, None, &[ChipId(0), ChipId(1)])
                })?;
                let outcome = ends.wait(RunId(run));
                outcome.result?;
                outcome.cleanup.map_or(Ok(()), Err)?;
            }
            emulator.committed_device_memory(ChipId(1))?;
            emulator.release_domain(kept.id().unwrap())?;
            emulator.domain_state(kept.id().unwrap())?;
            emulator.free(device)?;
            emulator.release_buffer(host)
        };
        let first = program();
        if let Err(error) = &first {
            assert_eq!(error.family(), Family::Backend, "{fault}: {error}");
        }
        let _ = emulator.close();
        assert_eq!(emulator.close(), Ok(()), "{fault}");
        finished.send(()).ok();
        drop(finished);
    });
    let stats = emulator.stats();
    assert_eq!((stats.domains, stats.host_buffers, stats.resident_buffers), (0, 0, 0), "{fault}");
    assert_eq!((stats.threads, stats.runs, stats.scratch), (0, 0, 0), "{fault}");
    assert!(stats.committed_bytes.iter().all(|b| *b == 0), "{fault}");
    assert!(stats.linked_names.is_empty());
    let accepted = emulator.journal().count(|e| matches!(e, EventKind::Accept(_)));
    assert_eq!(ends.all().len(), accepted, "{fault}: each accepted run ends exactly once");
}

#[test]
fn many_threads_submit_and_every_accepted_run_ends_once_in_order() {
    let rig = Rig::new(builder().chips(3).memory(Memory::default()));
    let request = DomainRequest::packed([0, 1, 2], vec![NamedBuffer::bytes("cells", 12)]);
    let zeros = rig.emulator.create_zeros(12).unwrap();
    let exchange = {
        let source = KernelObject::new(|k| {
            let domain = k.domain(k.scalar(0)?)?;
            for rank in 0..domain.size() {
                domain.buffer(rank, 0)?.cell(0)?.fetch_add(1)?;
            }
            let size = domain.size() as i32;
            domain
                .buffer(domain.rank(), 0)?
                .cell(0)?
                .wait(|v| v >= size)
                .and_then(|v| if v == size { Ok(()) } else { Err(KernelError::failed(format!("{v} signals"))) })
        });
        rig.emulator.register(&chip_spec("exchange", &[], 1).with_source(source.into_source())).unwrap().id
    };
    let next = AtomicU64::new(1);
    let (threads, rounds) = if cfg!(miri) { (2, 2) } else { (6, 60) };
    let rejected = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (rig, next, request, rejected) = (&rig, &next, &request, &rejected);
            scope.spawn(move || {
                for round in 0..rounds {
                    let run = next.fetch_add(1, Ordering::SeqCst);
                    let result = rig.submit(run, |o| {
                        let mut reply = DomainAllocation::new();
                        o.get_or_allocate_domain("shared", request, true, &mut reply)?;
                        let copies = [0, 1, 2].map(|chip| copy(buffer(&reply, chip, 0), zeros, 12));
                        let mut results = Vec::new();
                        o.copy_batch(&copies, &mut results)?;
                        assert!(results.iter().all(|r| *r == CopyResult::Done));
                        if (round + thread) % 7 == 0 {
                            return Err(BackendError::misuse(Call::Submit, "this one is given up"));
                        }
                        let args: Vec<TaskArgs> = (0..3).map(|rank| context(&reply, rank)).collect();
                        o.submit_next_level_group(exchange, &args, None, &[ChipId(0), ChipId(1), ChipId(2)])
                    });
                    match result {
                        Ok(()) => assert_eq!(rig.wait(run), RunOutcome::success()),
                        Err(error) => {
                            assert_eq!(error.family(), Family::Misuse);
                            rejected.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                }
            });
        }
    });
    let journal = rig.emulator.journal();
    let order = |wanted: fn(&EventKind) -> Option<RunId>| -> Vec<RunId> {
        journal.events().iter().filter_map(|e| wanted(&e.kind)).collect()
    };
    let accepted = order(|e| if let EventKind::Accept(run) = e { Some(*run) } else { None });
    let ended = order(|e| if let EventKind::Ended(run, true) = e { Some(*run) } else { None });
    assert_eq!(accepted, ended);
    assert_eq!(accepted.len() as u64 + rejected.load(Ordering::SeqCst), threads * rounds);
    rig.close();
}
