"""States of a worker, registration, the start and its failures (contract sections 1 and 3.5)."""

import os
import threading
import unittest

from support import OUT, Background, Rig, StandInTest, arguments, process_runs, until, words

from simpler.standin import ChipKernel, library
from simpler.task_interface import ArgDirection, CallConfig, ChipCallable
from simpler.worker import Worker


def unstarted(**config):
    config = {"platform": "a2a3sim", "runtime": "tensormap_and_ringbuffer", "device_ids": [0], **config}
    return Worker(level=3, **config)


class States(StandInTest):
    def test_only_a_ready_worker_admits_work(self):
        worker = unstarted()
        calls = {"submit": lambda: worker.submit(print), "create_buffer": lambda: worker.create_buffer(4)}
        for name, call in calls.items():
            with self.refused(RuntimeError, f"{name}: requires an initialized \\(READY\\) worker"):
                call()
        worker.close()
        with self.refused(RuntimeError, "requires an initialized"):
            worker.submit(print)

    def test_a_second_init_is_refused_and_changes_nothing(self):
        rig = Rig(self)
        with self.refused(RuntimeError, "already initialized"):
            rig.worker.init()
        rig.run(lambda orch: None)

    def test_a_closed_worker_is_closed_for_good(self):
        worker = unstarted()
        worker.close()
        worker.close()
        with self.refused(RuntimeError, "Worker is closed"):
            worker.init()
        with self.refused(RuntimeError, "worker is closed"):
            worker.register(print)

    def test_a_failed_start_leaves_only_close(self):
        worker = unstarted(enable_sdma=True)
        with self.refused(RuntimeError, r"chip worker 0 \(pid \d+\) failed during init: .*code -1"):
            worker.init()
        with self.refused(RuntimeError, "startup failed"):
            worker.init()
        with self.refused(RuntimeError, "startup failed"):
            worker.register(print)
        with self.refused(RuntimeError, "READY"):
            worker.submit(print)
        worker.close()

    def test_bad_configuration_is_an_error_of_init(self):
        for config, error, text in (
            ({"platform": "nonsense"}, ValueError, "Unknown platform: nonsense"),
            ({"runtime": "zzz"}, ValueError, "'zzz' is not available for platform"),
        ):
            worker = unstarted(**config)
            with self.refused(error, text):
                worker.init()
            worker.close()
        for timeout in (0, -1, float("nan"), float("inf")):
            with self.refused(ValueError, "positive finite"):
                unstarted(startup_timeout_s=timeout)

    def test_a_late_start_names_the_children_and_the_budget(self):
        self.environment(PTO_STANDIN_HANG_INIT="1")
        worker = unstarted(device_ids=[0, 1], startup_timeout_s=0.2)
        with self.refused(RuntimeError, r"chip worker\(s\) \[1\] did not become ready within 0.2s"):
            worker.init()
        worker.close()

    def test_close_on_another_thread_cancels_a_start(self):
        self.environment(PTO_STANDIN_HANG_INIT="0")
        worker = unstarted()
        start = Background(worker.init)
        until(lambda: worker._starting is not None and worker._starting.chips)
        worker.close()
        with self.refused(RuntimeError, "cancelled by close"):
            start.finish()

    def test_register_waits_for_a_start_under_way(self):
        self.environment(PTO_STANDIN_HANG_INIT="0")
        worker = unstarted()
        start = Background(worker.init)
        until(lambda: worker._starting is not None and worker._starting.chips)
        register = Background(lambda: worker.register(print))
        until(lambda: register.inside("register"))
        worker.close()
        with self.refused(RuntimeError, "startup failed|is closed"):
            register.finish()
        start.join()

    def test_unknown_keys_and_repeated_device_ids_pass(self):
        rig = Rig(self, no_such_key=1)
        worker = unstarted(device_ids=[0, 0])
        worker.init()
        self.assertEqual(len(worker._chip_pids), 2)
        worker.close()
        rig.run(lambda orch: None)

    def test_the_context_manager_closes_and_does_not_start(self):
        with unstarted() as worker:
            with self.refused(RuntimeError, "READY"):
                worker.submit(print)
        with self.refused(RuntimeError, "closed"):
            worker.init()

    def test_prewarm_is_validated_before_anything(self):
        worker = unstarted()
        config = CallConfig()
        config.runtime_env.ring_heap = 5
        with self.refused(ValueError, "ring_heap must be >= 1024"):
            worker.init(config)
        worker.init(CallConfig())
        worker.close()


class Registration(StandInTest):
    def test_equal_content_has_one_name_and_two_handles(self):
        worker = unstarted(num_sub_workers=1)
        first, second = worker.register(print), worker.register(print)
        self.assertEqual(first.hashid, second.hashid)
        self.assertIsNot(first, second)
        chip = worker.register(library.pto_store)
        self.assertEqual((chip.kind, chip.target_namespace), ("CHIP_CALLABLE", "LOCAL_CHIP"))
        self.assertEqual((first.kind, first.target_namespace), ("PYTHON_SERIALIZED", "LOCAL_PYTHON"))
        worker.close()

    def test_sixty_four_contents_and_no_more(self):
        worker = unstarted()
        handles = [worker.register(ChipKernel("pto_store", scalars=i)) for i in range(64)]
        with self.refused(RuntimeError, "callable capacity exhausted"):
            worker.register(ChipKernel("pto_store", scalars=64))
        worker.register(ChipKernel("pto_store", scalars=63))
        worker.unregister(handles[0])
        worker.register(ChipKernel("pto_store", scalars=64))
        worker.close()

    def test_what_cannot_be_registered(self):
        worker = unstarted()
        with self.refused(TypeError, "must be callable"):
            worker.register(5)
        with self.refused(TypeError, "CallableHandle"):
            worker.unregister(5)
        handle = worker.register(library.pto_store)
        worker.unregister(handle)
        with self.refused(KeyError, "not live"):
            worker.unregister(handle)
        worker.close()

    def test_a_callable_without_any_target_fails_the_start(self):
        worker = unstarted(num_sub_workers=0)
        worker.register(print)
        with self.refused(RuntimeError, "no eligible dispatch target"):
            worker.init()
        worker.close()

    def test_registration_after_the_start_and_inside_a_callback(self):
        rig = Rig(self)
        out = rig.worker.create_buffer(4)
        amount = 41

        def late(args):
            args[0].buffer.cast("B").cast("i")[0] = amount + args.scalar(0)

        def build(orch):
            orch.submit_sub(rig.worker.register(late), arguments((out, OUT), scalars=[1]))

        rig.run(build)
        self.assertEqual(words(out), [42])
        handle = rig.worker.register(ChipKernel("pto_store", scalars=9))
        rig.run(lambda orch: orch.submit_next_level(handle, arguments((out, OUT), scalars=[7]), worker=1))
        self.assertEqual(words(out), [7])

    def test_a_chip_that_cannot_load_a_callable_says_so(self):
        rig = Rig(self)
        alien = ChipCallable.build(signature=[ArgDirection.OUT], func_name="f", binary=b"\x7fELF", children=[])
        with self.refused(RuntimeError, "REGISTER_PARTIAL_FAILURE"):
            rig.worker.register(alien)
        with self.refused(RuntimeError, "REGISTER_PARTIAL_FAILURE"):
            rig.worker.register(ChipKernel("pto_no_such_kernel", [], 0))
        worker = unstarted()
        worker.register(alien)
        with self.refused(RuntimeError, "failed during init: .*not an artefact"):
            worker.init()
        worker.close()

    def test_a_callable_that_cannot_travel_is_refused_after_the_start_only(self):
        lock = threading.Lock()

        def holding(args):
            with lock:
                args[0].buffer.cast("B").cast("i")[0] = 3

        rig = Rig(self, start=False)
        early = rig.worker.register(holding)
        rig.worker.init()
        out = rig.worker.create_buffer(4)
        rig.run(lambda orch: orch.submit_sub(early, arguments((out, OUT))))
        self.assertEqual(words(out), [3])
        with self.refused(TypeError, "pickle"):
            rig.worker.register(lambda args: (lock, holding))


class Start(StandInTest):
    def test_children_lead_their_own_process_groups(self):
        rig = Rig(self, chips=2, subs=1)
        pids = (*rig.worker._chip_pids, *rig.worker._sub_pids)
        self.assertEqual(len(pids), 3)
        for pid in pids:
            self.assertEqual(os.getpgid(pid), pid)

    def test_an_orderly_close_leaves_no_process(self):
        rig = Rig(self)
        pids = (*rig.worker._chip_pids, *rig.worker._sub_pids)
        rig.worker.close()
        self.assertFalse(any(process_runs(pid) for pid in pids))
        self.assertEqual(rig.worker._chip_pids, [])

    def test_many_lives_in_one_process(self):
        for _ in range(5):
            rig = Rig(self)
            rig.allocate()[1].result()
            rig.worker.close()


if __name__ == "__main__":
    unittest.main()
