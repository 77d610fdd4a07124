"""Failure experiments (contract section 8) and poison (section 2)."""

import os
import signal
import unittest

from support import IN, INOUT, INT32, OUT, Background, Rig, StandInTest, process_runs, until, window_names, words, write

from simpler.standin import inject

DEATH = r"child process pid={} exited before mailbox completion \(signal={}\)"


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Ends a child and waits until it is dead."""
    os.kill(pid, number)
    until(lambda: not process_runs(pid))


class Tasks(StandInTest):
    def test_a_sub_failure_is_the_runs_own_business(self):
        rig = Rig(self)
        with self.refused(RuntimeError, r"child failed \(worker_id=0, code=1\): sub_worker: RuntimeError: failed on"):
            rig.run(lambda orch: rig.sub(orch, "pto_sub_fail", scalars=[1]))
        rig.run(lambda orch: None)
        rig.allocate()[1].result()

    def test_a_failed_chip_task_poisons_that_chips_lane_alone(self):
        rig = Rig(self, device_ids_offset=0)
        out = rig.worker.create_buffer(4)
        with self.refused(RuntimeError, "chip_process dev=0: RuntimeError: finalize_native_run failed with code -9"):
            rig.one("pto_fail", scalars=[5]).result()
        for _ in range(2):
            with self.refused(RuntimeError, "chip run lane is poisoned: finalize_native_run failed with code -9"):
                rig.one("pto_store", (out, OUT), scalars=[1]).result()
        rig.one("pto_store", (out, OUT), scalars=[1], chip=1).result()
        # Control still reaches the chip, and close is fine.
        rig.worker.free(rig.worker.alloc_child_tensor(0, (1,), INT32))
        rig.worker.close()

    def test_the_watchdog_ends_a_wait_that_nothing_ends(self):
        self.environment(SIMPLER_SCHEDULER_TIMEOUT_MS="20")
        rig = Rig(self)
        out = rig.worker.create_buffer(4)

        def then(orch, domain):
            rig.task(orch, "pto_await", (out, OUT), scalars=[domain[0].device_ctx, 0, 1])

        domain, run = rig.allocate(then=then)
        with self.refused(RuntimeError, "finalize_native_run failed with code -100"):
            run.result()
        self.assertTrue(domain.freed)
        with self.refused(RuntimeError, "chip run lane is poisoned"):
            rig.one("pto_store", (out, OUT), scalars=[1]).result()

    def test_a_crashing_kernel_ends_its_chip(self):
        rig = Rig(self)
        pid = rig.worker._chip_pids[0]
        with self.refused(RuntimeError, "progress failed: " + DEATH.format(pid, 11)):
            rig.one("crash", (rig.worker.create_buffer(4), OUT)).result()
        with self.refused(RuntimeError, "endpoint is poisoned: " + DEATH.format(pid, 11)):
            rig.one("pto_fail", scalars=[1]).result()
        rig.one("pto_store", (rig.worker.create_buffer(4), OUT), scalars=[1], chip=1).result()
        rig.worker.close()

    def test_a_stale_device_address_crashes_the_chip(self):
        rig = Rig(self)
        domain = rig.retained()
        context = domain[0].device_ctx
        domain.release()
        with self.refused(RuntimeError, r"signal=11"):
            rig.one("pto_rank", (rig.worker.create_buffer(8), OUT), scalars=[context]).result()


class Deaths(StandInTest):
    def test_a_chip_killed_in_mid_run_is_a_failed_run(self):
        rig = Rig(self)
        pid = rig.worker._chip_pids[0]
        run = rig.hold(rig.worker.create_buffer(4))
        kill(pid)
        with self.refused(RuntimeError, DEATH.format(pid, 9)):
            run.result()
        rig.one("pto_store", (rig.worker.create_buffer(4), OUT), scalars=[1], chip=1).result()
        rig.worker.close()

    def test_a_sub_worker_killed_in_mid_run_leaves_the_chips_sound(self):
        rig = Rig(self)
        gate = rig.worker.create_buffer(8)
        run = rig.submit(lambda orch: rig.sub(orch, "pto_gate", (gate, INOUT)))
        until(lambda: words(gate)[1] == 1)
        pid = rig.worker._sub_pids[0]
        kill(pid)
        with self.refused(RuntimeError, DEATH.format(pid, 9)):
            run.result()
        with self.refused(RuntimeError, DEATH.format(pid, 9)):
            rig.run(lambda orch: rig.sub(orch, "pto_gate", (gate, INOUT)))
        rig.allocate()[1].result()
        rig.worker.close()

    def test_the_other_sub_worker_takes_over(self):
        rig = Rig(self, subs=2)
        kill(rig.worker._sub_pids[0])
        out = rig.worker.create_buffer(4)
        until(lambda: rig.worker._native.subs[0].hung_up)
        rig.run(lambda orch: rig.sub(orch, "pto_sub_add", (out, INOUT), scalars=[4]))
        self.assertEqual(words(out), [4])

    def test_an_idle_death_is_noticed_when_the_chip_is_used(self):
        rig = Rig(self)
        device, host = rig.worker.alloc_child_tensor(0, (1,), INT32), rig.worker.create_buffer(4)
        pid = rig.worker._chip_pids[0]
        kill(pid)
        rig.run(lambda orch: None)
        # Nobody has collected the process yet, so its exit status is there for whoever asks.
        self.assertEqual(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG).si_status, 9)
        with self.refused(RuntimeError, "control_copy_to: " + DEATH.format(pid, 9)):
            rig.worker.copy_to(device, host)
        with self.refused(RuntimeError, "control_malloc failed: mailbox has an unresolved timed-out control command"):
            rig.worker.alloc_child_tensor(0, (1,), INT32)
        rig.worker.alloc_child_tensor(1, (1,), INT32)
        rig.worker.release_buffer(host)
        rig.worker.close()

    def test_allocation_with_a_dead_member_fails_on_all_and_poisons_nothing(self):
        rig = Rig(self)
        kill(rig.worker._chip_pids[0])
        with self.refused(RuntimeError, r"alloc_domain\(allocation_id=0\) failed on 2/2 chips"):
            rig.allocate()
        self.assertEqual(window_names(), [])
        rig.allocate(workers=[1])[1].result()
        rig.worker.close()

    def test_a_dead_member_makes_the_release_fail_and_poisons_the_worker(self):
        rig = Rig(self)
        gate = rig.worker.create_buffer(8)
        run = rig.allocate(then=lambda orch, _d: rig.sub(orch, "pto_gate", (gate, INOUT)))[1]
        kill(rig.worker._chip_pids[0])
        write(gate, [1])
        with self.refused(RuntimeError, "release_domain.*failed on 2/2 chips"):
            run.result(60)
        cause = run._error
        for call in (lambda: rig.worker.submit(print), lambda: rig.worker.create_buffer(4)):
            with self.refused(RuntimeError, r"a prior run's ordered cleanup failed.*close\(\) it") as caught:
                call()
            self.assertIs(caught.exception.__cause__, cause)
        with self.refused(RuntimeError, "release_domain"):
            rig.worker.close()
        self.assertTrue(process_runs(rig.worker._chip_pids[1]))
        # The window of a killed chip keeps its name until somebody removes it.
        self.assertEqual(len(window_names()), 1)

    def test_a_kill_in_mid_collective_reports_the_death_and_poisons(self):
        self.environment(SIMPLER_SCHEDULER_TIMEOUT_MS="50")
        rig = Rig(self)
        outs = [rig.worker.create_buffer(4) for _ in range(2)]
        pid = rig.worker._chip_pids[1]
        _, run = rig.allocate(then=lambda orch, d: rig.handshake(orch, d, outs, [99, 99]))
        kill(pid)
        with self.refused(RuntimeError, f"{DEATH.format(pid, 9)}|code -100"):
            run.result()
        with self.refused(RuntimeError, "a prior run's ordered cleanup failed"):
            rig.worker.submit(print)

    def test_a_retained_domain_of_a_dead_member(self):
        rig = Rig(self)
        domain, host = rig.retained(), rig.worker.create_buffer(64)
        kill(rig.worker._chip_pids[0])
        rig.worker.copy_from(host, domain[1].buffers["signal"])
        errors = []
        for call in (domain.release, rig.worker.close, rig.worker.close):
            with self.refused(RuntimeError, "release_domain") as caught:
                call()
            errors.append(caught.exception)
        self.assertEqual(len(set(map(id, errors))), 1)
        self.assertEqual((domain.released, domain.freed), (True, False))

    def test_with_all_members_dead_close_succeeds_once_the_register_is_cleared(self):
        rig = Rig(self)
        rig.retained()
        for pid in rig.worker._chip_pids:
            kill(pid)
        for _ in range(2):
            with self.refused(RuntimeError, "release_domain"):
                rig.worker.close()
        rig.worker._live_domains.clear()
        rig.worker.close()
        self.assertEqual(len(window_names()), 1)
        os.unlink(f"/dev/shm/{window_names()[0]}")

    def test_a_task_of_a_dead_chip_does_not_hold_the_others_up(self):
        rig = Rig(self)
        kill(rig.worker._chip_pids[0])
        data, out = rig.worker.create_buffer(4), rig.worker.create_buffer(4)

        def build(orch):
            rig.task(orch, "pto_store", (data, OUT), scalars=[1], chip=0)
            rig.task(orch, "pto_copy", (data, IN), (out, OUT), chip=1)
            rig.task(orch, "pto_store", (rig.worker.create_buffer(4), OUT), scalars=[1], chip=1)

        with self.refused(RuntimeError, "exited before mailbox completion"):
            rig.run(build)


class Injected(StandInTest):
    def test_a_failed_release_is_final_and_given_to_everybody(self):
        rig = Rig(self)
        domains = [rig.retained(name) for name in "abc"]
        inject("release_domain", skip=2, times=2)
        with self.refused(RuntimeError, r"release_domain\(allocation_id=1\) failed on 2/2 chips.*injected"):
            rig.worker.close()
        self.assertEqual([d.freed for d in domains], [True, False, True])
        with self.refused(RuntimeError, "injected"):
            rig.worker.close()

    def test_a_failed_cleanup_surfaces_only_where_the_run_succeeded(self):
        rig = Rig(self)
        inject("release_domain", times=2)
        _, run = rig.allocate(then=lambda orch, _d: rig.sub(orch, "pto_sub_fail", scalars=[1]))
        with self.refused(RuntimeError, "failed on purpose"):
            run.result()
        with self.refused(RuntimeError, "ordered cleanup failed"):
            rig.worker.submit(print)

    def test_waiters_of_a_release_get_its_outcome(self):
        rig = Rig(self)
        domain = rig.retained()
        inject("release_domain", chip=0)
        with self.refused(RuntimeError, "2/2 chips; first error chip=0: injected"):
            Background(domain.release).finish()
        domain.release()
        with self.refused(RuntimeError, "injected"):
            rig.worker.close()


if __name__ == "__main__":
    unittest.main()
