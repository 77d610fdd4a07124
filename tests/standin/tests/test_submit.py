"""Submissions, handles, depth and order (contract section 2)."""

import ctypes
import gc
import threading
import unittest
import weakref

from support import IN, INOUT, OUT, Background, Rig, StandInTest, arguments, until, words, write

from simpler.task_interface import CallConfig


class Submit(StandInTest):
    def test_the_callback_runs_at_once_on_this_thread_and_gets_its_arguments(self):
        rig = Rig(self)
        seen, given = [], object()
        run = rig.worker.submit(lambda orch, args, config: seen.append((threading.get_ident(), args, config)), given)
        self.assertEqual(seen[0][0], threading.get_ident())
        self.assertIs(seen[0][1], given)
        self.assertIsInstance(seen[0][2], CallConfig)
        self.assertIsNone(run.result())
        rig.worker.submit(lambda orch, args, config: seen.append(config), None, "opaque").wait()
        self.assertEqual(seen[1], "opaque")
        self.assertIsNone(rig.worker.run(lambda *_: 5))

    def test_any_exception_of_the_callback_comes_back_itself(self):
        rig = Rig(self)
        for error in (ZeroDivisionError("x"), KeyboardInterrupt("k"), SystemExit(3)):

            def build(_orch, error=error):
                raise error

            with self.assertRaises(type(error)) as caught:
                rig.submit(build)
            self.assertIs(caught.exception, error)
        with self.assertRaises(TypeError):
            rig.worker.submit(5)
        rig.run(lambda orch: None)

    def test_a_failed_callback_fences_what_started_and_cancels_the_rest(self):
        rig = Rig(self)
        gate, second = rig.worker.create_buffer(8), rig.worker.create_buffer(4)

        def build(orch):
            rig.sub(orch, "pto_gate", (gate, INOUT))
            rig.task(orch, "pto_copy", (gate, IN), (rig.worker.create_buffer(8), OUT))
            rig.task(orch, "pto_store", (second, OUT), scalars=[9], chip=1)
            until(lambda: words(gate)[1] == 1 and words(second) == [9])
            raise KeyError("x")

        submit = Background(lambda: rig.submit(build))
        until(lambda: submit.inside("wait_run"))
        self.assertTrue(submit.is_alive())
        write(gate, [1])
        with self.assertRaises(KeyError):
            submit.finish()
        self.assertEqual(words(second), [9])

    def test_a_failed_callback_behind_a_held_run_returns_at_once(self):
        rig = Rig(self)
        run = rig.hold(rig.worker.create_buffer(4))
        with self.assertRaises(ZeroDivisionError):
            rig.submit(lambda orch: 1 / 0)
        self.assertFalse(run.done)
        rig.open()
        run.result()

    def test_the_orchestrator_is_dead_outside_its_callback(self):
        rig = Rig(self)
        kept = []
        rig.run(kept.append)
        orch, out = kept[0], rig.worker.create_buffer(4)
        for call in (
            lambda: rig.task(orch, "pto_store", (out, OUT), scalars=[1]),
            lambda: rig.sub(orch, "pto_sub_fail", scalars=[1]),
            lambda: orch.scope_begin(),
            lambda: orch.alloc((4,), 2),
        ):
            with self.refused(RuntimeError, "task submission requires an active run"):
                call()


class Handles(StandInTest):
    def test_a_timeout_changes_nothing(self):
        rig = Rig(self)
        run = rig.hold(rig.worker.create_buffer(4))
        for wait in (run.wait, run.result):
            with self.refused(TimeoutError, r"RunHandle.wait\(\) timed out"):
                wait(0)
        self.assertFalse(run.done)
        rig.open()
        self.assertIsNone(run.result(60))
        self.assertIsNone(run.result(0))
        self.assertTrue(run.done)

    def test_bad_timeouts_are_refused(self):
        rig = Rig(self)
        run = rig.submit(lambda orch: None)
        for timeout in (-1, float("inf"), float("nan")):
            with self.refused(ValueError, "non-negative finite"):
                run.result(timeout)
        run.result()

    def test_all_waiters_get_the_same_error_object(self):
        rig = Rig(self)
        gate = rig.worker.create_buffer(8)

        def build(orch):
            rig.sub(orch, "pto_gate", (gate, INOUT))
            rig.sub(orch, "pto_sub_fail", (gate, IN), scalars=[1])

        run = rig.submit(build)
        waiters = [Background(run.result) for _ in range(4)]
        until(lambda: all(w.inside("wait") for w in waiters))
        write(gate, [1])
        errors = []
        for waiter in waiters:
            with self.refused(RuntimeError, "failed on purpose"):
                waiter.finish()
            errors.append(waiter.error)
        self.assertEqual(len(set(map(id, errors))), 1)

    def test_done_says_fence_and_not_cleanup(self):
        rig = Rig(self)
        domain, run = rig.allocate()
        until(lambda: run.done)
        self.assertFalse(domain.freed)
        rig.submit(lambda orch: self.assertTrue(domain.freed)).result()
        run.result()


class Order(StandInTest):
    def test_two_runs_are_admitted_and_the_third_waits_before_its_callback(self):
        rig = Rig(self)
        events = []
        first = rig.hold(rig.worker.create_buffer(4))
        second = rig.submit(lambda orch: events.append("second"))
        third = Background(lambda: rig.submit(lambda orch: events.append("third")))
        until(lambda: third.inside("begin_run"))
        self.assertEqual(events, ["second"])
        self.assertFalse(second.done)
        rig.open()
        third.finish().result()
        self.assertEqual(events, ["second", "third"])
        first.result()
        second.result()

    def test_at_depth_one_the_second_waits(self):
        self.environment(PTO_STANDIN_DEPTH="1")
        rig = Rig(self)
        first = rig.hold(rig.worker.create_buffer(4))
        second = Background(lambda: rig.submit(lambda orch: None))
        until(lambda: second.inside("begin_run"))
        rig.open()
        second.finish().result()
        first.result()

    def test_runs_execute_one_at_a_time(self):
        rig = Rig(self)
        held, other = rig.worker.create_buffer(4), rig.worker.create_buffer(4)
        first = rig.hold(held, chip=0)
        second = rig.one("pto_store", (other, OUT), scalars=[3], chip=1)
        self.assertEqual(rig.worker._native.chips[1].current, None)
        self.assertEqual(words(other), [0])
        rig.open()
        second.result()
        self.assertEqual(words(other), [3])
        first.result()

    def test_control_waits_for_the_head_of_the_queue(self):
        rig = Rig(self)
        events = []
        first = rig.hold(rig.worker.create_buffer(4))

        def build(orch):
            events.append("callback")
            orch.free(orch.alloc_child_tensor(0, (4,), 2))
            events.append("control")

        second = Background(lambda: rig.submit(build))
        until(lambda: second.inside("await_head"))
        self.assertEqual(events, ["callback"])
        rig.open()
        second.finish().result()
        self.assertEqual(events, ["callback", "control"])
        first.result()

    def test_control_after_a_task_is_refused(self):
        rig = Rig(self)
        out, zeros = rig.worker.create_buffer(4), rig.worker.create_buffer(4)
        resident = rig.worker.alloc_child_tensor(0, (1,), 2)
        for name, call in {
            "allocate_domain": lambda o: o.allocate_domain(name="x", workers=[0], window_size=4),
            "alloc_child_tensor": lambda o: o.alloc_child_tensor(0, (1,), 2),
            "copy_to": lambda o: o.copy_to(resident, zeros),
            "copy_from": lambda o: o.copy_from(zeros, resident),
            "free": lambda o: o.free(resident),
            "committed_device_memory": lambda o: o.committed_device_memory(0),
        }.items():

            def build(orch, call=call):
                rig.task(orch, "pto_store", (out, OUT), scalars=[1])
                call(orch)

            with self.refused(RuntimeError, f"{name}: direct device control cannot follow a task submission"):
                rig.submit(build)
        rig.worker.free(resident)

    def test_control_outside_a_run_needs_all_runs_waited_for(self):
        rig = Rig(self)
        run = rig.submit(lambda orch: None)
        until(lambda: run.done)
        with self.refused(RuntimeError, r"1 run\(s\) still in flight"):
            rig.worker.alloc_child_tensor(0, (4,), 2)
        run.result()
        rig.worker.free(rig.worker.alloc_child_tensor(0, (4,), 2))

    def test_a_run_that_allocated_serialises_its_successor(self):
        rig = Rig(self)
        out = rig.worker.create_buffer(4)
        address_run = []

        def then(orch, _domain):
            rig.gates[0] = 0
            rig.task(orch, "pto_wait_cell", (out, OUT), scalars=[ctypes.addressof(rig.gates)])

        domain, run = rig.allocate(then=then)
        second = Background(lambda: rig.submit(lambda orch: address_run.append(domain.freed)))
        until(lambda: second.inside("wait_run"))
        self.assertEqual(address_run, [])
        rig.open()
        second.finish().result()
        self.assertEqual(address_run, [True])
        run.result()

    def test_callbacks_of_two_threads_do_not_overlap(self):
        rig = Rig(self)
        inside, leave, events = threading.Event(), threading.Event(), []

        def first(_orch):
            inside.set()
            leave.wait()
            events.append("first")

        one = Background(lambda: rig.run(first))
        inside.wait()
        two = Background(lambda: rig.run(lambda orch: events.append("second")))
        until(lambda: two.inside("exclusive"))
        leave.set()
        one.finish()
        two.finish()
        self.assertEqual(events, ["first", "second"])

    def test_scopes_nest_to_a_limit_and_must_balance(self):
        rig = Rig(self)
        depth = []

        def build(orch):
            with orch.scope() as inner:
                self.assertIs(inner, orch)
            try:
                while True:
                    orch.scope_begin()
                    depth.append(1)
            except RuntimeError as error:
                self.assertIn("maximum nesting depth", str(error))
            for _ in depth:
                orch.scope_end()

        rig.run(build)
        self.assertEqual(len(depth), 63)
        with self.refused(RuntimeError, "scope_end without scope_begin"):
            rig.submit(lambda orch: orch.scope_end())
        rig.run(lambda orch: None)

    def test_handles_keep_arguments_until_the_cleanup(self):
        class Arguments:
            pass

        rig = Rig(self)
        rig.gates[0] = 0
        kept = Arguments()
        alive = weakref.ref(kept)
        out = rig.worker.create_buffer(4)
        task = arguments((out, OUT), scalars=[ctypes.addressof(rig.gates)])
        run = rig.worker.submit(
            lambda orch, args, config: orch.submit_next_level(rig.handles["pto_wait_cell"], task, worker=0), kept
        )
        del kept
        gc.collect()
        self.assertIsNotNone(alive())
        rig.open()
        run.result()
        gc.collect()
        self.assertIsNone(alive())


if __name__ == "__main__":
    unittest.main()
