"""The table of close situations (contract section 1)."""

import os
import sys
import threading
import unittest

from support import OUT, Background, Rig, StandInTest, process_runs, until, words


class Close(StandInTest):
    def test_refused_inside_a_callback_and_the_worker_stays_usable(self):
        rig = Rig(self)
        with self.refused(RuntimeError, "cannot be called from within"):
            rig.run(lambda orch: rig.worker.close())
        rig.run(lambda orch: None)

    def test_refused_on_any_thread_but_that_of_init_even_after_it_ended(self):
        rig = Rig(self)
        foreign = Background(rig.worker.close)
        with self.refused(RuntimeError, "must be closed on the thread"):
            foreign.finish()
        rig.run(lambda orch: None)
        other = Rig(self, start=False)
        Background(other.worker.init).finish()
        with self.refused(RuntimeError, "must be closed on the thread"):
            other.worker.close()
        # Handing the ownership over is the test's business: no thread may close this worker any more.
        other.worker._init_owner_thread = threading.current_thread()
        other.worker.close()

    def test_waits_for_a_run_that_ends_in_time_and_its_handle_stays_readable(self):
        rig = Rig(self)
        out = rig.worker.create_buffer(4)
        run = rig.hold(out)
        opener = Background(lambda: rig.open())
        rig.worker.close()
        opener.join()
        run.result()
        self.assertTrue(run.done)

    def test_a_run_beyond_the_budget_defers_teardown_and_a_retry_completes_it(self):
        self.environment(PTO_STANDIN_CLOSE_S="0")
        rig = Rig(self)
        run = rig.hold(rig.worker.create_buffer(4))
        with self.refused(TimeoutError, "run fence.*teardown deferred"):
            rig.worker.close()
        self.assertTrue(all(process_runs(pid) for pid in rig.worker._chip_pids))
        with self.refused(RuntimeError, "READY"):
            rig.worker.submit(print)
        rig.open()
        run.result()
        rig.worker.close()
        self.assertEqual(rig.worker._chip_pids, [])

    def test_an_operation_beyond_the_budget_defers_teardown(self):
        self.environment(PTO_STANDIN_CLOSE_S="0")
        rig = Rig(self)
        inside, leave = threading.Event(), threading.Event()

        def build(_orch):
            inside.set()
            leave.wait()

        submit = Background(lambda: rig.run(build))
        inside.wait()
        with self.refused(TimeoutError, "operation.*teardown deferred"):
            rig.worker.close()
        leave.set()
        submit.finish()
        rig.worker.close()

    def test_the_error_of_a_run_nobody_waited_for_is_raised_and_replayed(self):
        rig = Rig(self)
        run = rig.submit(lambda orch: rig.sub(orch, "pto_sub_fail", scalars=[1]))
        errors = []
        for call in (rig.worker.close, rig.worker.close, run.result):
            with self.refused(RuntimeError, "failed on purpose") as caught:
                call()
            errors.append(caught.exception)
        self.assertEqual(len(set(map(id, errors))), 1)
        self.assertEqual(rig.worker._chip_pids, [])

    def test_a_submission_that_waits_for_depth_is_admitted_and_drained_first(self):
        rig = Rig(self)
        out, last = rig.worker.create_buffer(4), rig.worker.create_buffer(4)
        rig.hold(out)
        rig.submit(lambda orch: None)
        third = Background(lambda: rig.one("pto_store", (last, OUT), scalars=[5]))
        until(lambda: third.inside("begin_run"))
        closer = threading.current_thread()
        opener = Background(lambda: (until(lambda: inside_close(closer)), rig.open()))
        seen = words(last)
        run = None
        # The buffer is unmapped by close, so its content is looked at just before.
        tear_down = rig.worker._tear_down

        def looking():
            seen[:] = words(last)
            return tear_down()

        rig.worker._tear_down = looking
        rig.worker.close()
        opener.finish()
        run = third.finish()
        run.result()
        self.assertEqual(seen, [5])

    def test_an_exported_view_fails_close_until_it_is_gone(self):
        rig = Rig(self)
        buffer = rig.worker.create_buffer(8)
        view = buffer.shm.buf[:4]
        for _ in range(2):
            with self.assertRaises(BufferError):
                rig.worker.close()
            self.assertTrue(all(process_runs(pid) for pid in rig.worker._chip_pids))
        view.release()
        rig.worker.close()
        rig.worker.close()

    def test_a_domain_that_cannot_be_released_fails_every_close(self):
        rig = Rig(self)
        domain = rig.retained()
        for pid in rig.worker._chip_pids:
            os.kill(pid, 9)
        errors = []
        for _ in range(3):
            with self.refused(RuntimeError, "release_domain.*failed on 2/2 chips") as caught:
                rig.worker.close()
            errors.append(caught.exception)
        self.assertEqual(len(set(map(id, errors))), 1)
        self.assertFalse(domain.freed)
        self.assertTrue(process_runs(rig.worker._sub_pids[0]))

    def test_concurrent_callers_get_the_one_outcome(self):
        rig = Rig(self)
        rig.submit(lambda orch: rig.sub(orch, "pto_sub_fail", scalars=[1]))
        begun, go = threading.Event(), threading.Event()
        tear_down = rig.worker._tear_down

        def slowly():
            begun.set()
            go.wait()
            return tear_down()

        rig.worker._tear_down = slowly
        joiner = Background(lambda: (begun.wait(), rig.worker.close()))

        def let_go():
            until(lambda: joiner.inside("close"))
            go.set()

        helper = Background(let_go)
        with self.refused(RuntimeError, "failed on purpose") as mine:
            rig.worker.close()
        with self.refused(RuntimeError, "failed on purpose") as theirs:
            joiner.finish()
        helper.finish()
        self.assertIs(mine.exception, theirs.exception)

    def test_retained_domains_and_buffers_go_with_close(self):
        rig = Rig(self)
        domain = rig.retained()
        rig.worker.create_buffer(4096)
        rig.worker.close()
        self.assertTrue(domain.freed)


def inside_close(thread) -> bool:
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        if frame.f_code.co_name == "_drain_and_tear_down":
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    unittest.main()
