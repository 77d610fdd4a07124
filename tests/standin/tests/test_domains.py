"""Domains: allocation, ranks, contents, release and retention (contract sections 3.1, 4 and 5)."""

import importlib.util
import os
import struct
import sys
import unittest
from pathlib import Path

from support import INOUT, ROOT, Background, Rig, StandInTest, script, signal_buffer, until, window_names, words, write

from simpler.orchestrator import Orchestrator
from simpler.standin import inject, public
from simpler.task_interface import CommBufferSpec
from simpler.worker import Worker


class Allocation(StandInTest):
    def test_every_refusal_of_the_table(self):
        rig = Rig(self)
        spec = CommBufferSpec
        for request, error, text in (
            ({"workers": []}, ValueError, "workers must be non-empty"),
            ({"workers": [0, 0]}, ValueError, "contains duplicates"),
            ({"workers": [2]}, ValueError, r"worker_id 2 outside \[0, 2\)"),
            ({"workers": [-1]}, ValueError, r"worker_id -1 outside \[0, 2\)"),
            ({"window": 0}, ValueError, "window_size must be positive"),
            ({"buffers": [spec("x", "o", 1, 1)] * 2}, ValueError, "duplicate buffer names"),
            ({"window": 5}, ValueError, "buffers sum to 64 bytes, exceeds window_size=5"),
            ({"buffers": [spec("x", "o", 1, -1)]}, struct.error, ""),
            ({"window": 1 << 64}, struct.error, ""),
        ):
            with self.refused(error, text):
                rig.allocate(**request)
        rig.allocate()[1].result()

    def test_only_while_a_graph_is_being_built(self):
        rig = Rig(self)
        kept = []
        rig.run(kept.append)
        with self.refused(RuntimeError, "only valid while a run's graph is being built"):
            kept[0].allocate_domain(name="d", workers=[0], window_size=4)

    def test_a_live_name_is_taken_and_a_released_one_free_at_once(self):
        rig = Rig(self)

        def then(orch, first):
            with self.refused(ValueError, "domain 'd' already live"):
                orch.allocate_domain(name="d", workers=[0], window_size=4)
            first.release()
            first.release()
            self.assertEqual((first.released, first.freed), (True, False))
            orch.allocate_domain(name="d", workers=[0], window_size=4)

        domain, run = rig.allocate(then=then)
        run.result()
        self.assertTrue(domain.freed)
        with self.refused(RuntimeError, "already released"):
            domain[0]

    def test_workers_give_ranks_and_buffers_stand_back_to_back(self):
        rig = Rig(self)
        sizes = {"a": 16, "b": 3, "c": 4, "none": 0}
        specs = [CommBufferSpec(name, "", 0, nbytes) for name, nbytes in sizes.items()]
        seen = []

        def then(orch, domain):
            with self.assertRaises(KeyError):
                domain[2]
            for chip in (1, 0):
                context = domain[chip]
                seen.append((context.domain_rank, context.domain_size, context.actual_window_size))
                base = context.local_window_base
                offsets = [context.buffers[n].base - base for n in sizes]
                self.assertEqual(offsets, [0, 16, 19, 23])
                self.assertEqual([context.buffers[n].nbytes for n in sizes], list(sizes.values()))
                self.assertEqual(context.buffers["a"].backend_kind.name, "VMM_WINDOW")
            outs = [rig.worker.create_buffer(8) for _ in range(2)]
            for chip, out in enumerate(outs):
                rig.task(orch, "pto_rank", (out, INOUT), scalars=[domain[chip].device_ctx], chip=chip)
            seen.append(outs)

        domain, run = rig.allocate(workers=(1, 0), window=4097, buffers=specs, then=then)
        run.result()
        self.assertEqual(seen[:2], [(0, 2, 4097), (1, 2, 4097)])
        self.assertEqual([words(out) for out in seen[2]], [[1, 2], [0, 2]])
        self.assertEqual(domain.workers, (1, 0))

    def test_a_fresh_window_is_zero_after_a_dirty_one(self):
        rig = Rig(self)
        dirty, seen = rig.worker.create_buffer(64), rig.worker.create_buffer(64)
        write(dirty, [-1] * 16)
        for _ in range(2):

            def then(orch, domain):
                orch.copy_from(seen, domain[0].buffers["signal"])
                self.assertEqual(words(seen), [0] * 16)
                orch.copy_to(domain[0].buffers["signal"], dirty)

            rig.allocate(then=then)[1].result()

    def test_unreleased_domains_go_in_the_cleanup_also_after_a_failed_callback(self):
        rig = Rig(self)
        domain, run = rig.allocate()
        run.result()
        self.assertTrue(domain.freed)
        kept = []
        with self.assertRaises(ZeroDivisionError):
            rig.allocate(then=lambda _orch, d: kept.append(d) or 1 / 0)
        self.assertTrue(kept[0].freed)
        self.assertEqual(window_names(), [])

    def test_allocation_on_another_thread_waits_for_the_callback(self):
        rig = Rig(self)
        made = []

        def build(orch):
            other = Background(lambda: orch.allocate_domain(name="x", workers=[0], window_size=4))
            until(lambda: other.inside("shared"))
            made.append(other)

        rig.run(build)
        with self.refused(RuntimeError, "only valid while"):
            made[0].finish()

    def test_more_than_sixty_four_ranks_fail_at_the_first_allocation(self):
        rig = Rig(self, chips=65, subs=0)
        with self.refused(RuntimeError, "65 chips"):
            rig.allocate(workers=[0])

    def test_a_window_that_does_not_fit_is_an_error_and_leaves_nothing(self):
        rig = Rig(self)
        with self.refused(RuntimeError, "alloc_domain.*failed on 2/2 chips"):
            rig.allocate(window=1 << 60, buffers=[])
        self.assertEqual(window_names(), [])
        rig.allocate()[1].result()

    def test_a_partial_allocation_is_freed_in_the_cleanup(self):
        rig = Rig(self)
        inject("alloc_domain", chip=1, after_effect=True)
        with self.refused(RuntimeError, "alloc_domain.*failed on 1/2 chips.*injected"):
            rig.allocate()
        self.assertEqual((window_names(), rig.worker.live_domains), ([], {}))
        rig.allocate()[1].result()


class LegacyRetention(StandInTest):
    def test_contents_persist_and_reuse_frees_nothing(self):
        rig = Rig(self)
        domain = rig.retained()
        outs = [rig.worker.create_buffer(4) for _ in range(2)]
        seen = []
        for step in (1, 2, 3):
            run = rig.submit(lambda orch, n=step: rig.handshake(orch, domain, outs, [2 * n, n]))
            self.assertFalse(run._resources.requires_ordered_cleanup)
            run.result()
            seen.append([words(out)[0] for out in outs])
        self.assertEqual(seen, [[2, 1], [4, 2], [6, 3]])
        self.assertFalse(domain.freed)
        domain.release()
        self.assertTrue(domain.freed)

    def test_a_reset_gives_a_fresh_window_again(self):
        rig = Rig(self)
        domain = rig.retained(workers=(1, 0))
        outs = [rig.worker.create_buffer(4) for _ in range(2)]
        zeros = rig.worker.create_buffer(64)
        for _ in range(3):

            def build(orch):
                for chip in domain.workers:
                    orch.copy_to(domain[chip].buffers["signal"], zeros)
                rig.handshake(orch, domain, outs)

            rig.run(build)
            self.assertEqual([words(out)[0] for out in outs], [2, 1])
        rig.worker.close()
        self.assertTrue(domain.freed)

    def test_a_failing_reuse_leaves_the_domain_live_and_the_worker_sound(self):
        rig = Rig(self)
        domain = rig.retained()
        with self.refused(RuntimeError, "failed on purpose"):
            rig.run(lambda orch: rig.sub(orch, "pto_sub_fail", scalars=[1]))
        with self.assertRaises(ZeroDivisionError):
            rig.submit(lambda orch: 1 / 0)
        self.assertFalse(domain.freed)
        rig.run(lambda orch: None)

    def test_failing_after_the_detachment_keeps_and_before_it_frees(self):
        rig = Rig(self)
        kept = {}

        def after(_orch, domain):
            kept["after"] = domain
            rig.detach(domain)
            raise KeyError

        def before(_orch, domain):
            kept["before"] = domain
            raise KeyError

        for name, then in (("after", after), ("before", before)):
            with self.assertRaises(KeyError):
                rig.allocate(name, then=then)
        self.assertEqual((kept["after"].freed, kept["before"].freed), (False, True))

    def test_release_works_outside_runs_in_callbacks_and_on_other_threads(self):
        rig = Rig(self)
        domains = [rig.retained(name) for name in "abc"]
        domains[0].release()
        rig.run(lambda orch: orch.release_domain(domains[1]))
        Background(domains[2].release).finish()
        self.assertTrue(all(d.freed for d in domains))

    def test_release_is_immediate_even_while_another_run_executes(self):
        rig = Rig(self)
        domain = rig.retained(workers=[1])
        run = rig.hold(rig.worker.create_buffer(4), chip=0)
        domain.release()
        self.assertTrue(domain.freed)
        self.assertFalse(run.done)
        rig.open()
        run.result()

    def test_the_first_use_serialises_its_successor_although_detached(self):
        rig = Rig(self)
        _, run = rig.allocate(then=lambda _orch, d: rig.detach(d))
        self.assertTrue(run._resources.requires_ordered_cleanup)
        run.result()


class PublicRetention(StandInTest):
    """The rules of the public call; run on the stand-in's own and on one added from outside."""

    def install(self) -> None:
        public()
        self.addCleanup(self.uninstall)

    def uninstall(self) -> None:
        del Orchestrator.get_or_allocate_domain

    def setUp(self) -> None:
        super().setUp()
        if hasattr(Orchestrator, "get_or_allocate_domain"):
            self.uninstall()
        self.install()

    def lease(self, rig, name="d", window=64, workers=(0, 1), retain=True, then=None, buffers=None):
        seen = []

        def build(orch):
            seen.append(
                orch.get_or_allocate_domain(
                    name=name,
                    workers=workers,
                    window_size=window,
                    buffers=signal_buffer() if buffers is None else buffers,
                    retain_after_run=retain,
                )
            )
            if then is not None:
                then(orch, seen[0])

        try:
            run = rig.submit(build)
        except BaseException as error:
            error.domain = seen[0] if seen else None
            raise
        return seen[0], run

    def test_one_allocation_serves_many_runs(self):
        rig = Rig(self)
        first, run = self.lease(rig)
        run.result()
        for _ in range(3):
            again, run = self.lease(rig)
            run.result()
            self.assertIs(again, first)
        self.assertFalse(first.freed)
        rig.worker.close()
        self.assertTrue(first.freed)

    def test_without_retention_it_goes_with_its_run(self):
        rig = Rig(self)
        domain, run = self.lease(rig, retain=False)
        run.result()
        self.assertTrue(domain.freed)
        again, run = self.lease(rig)
        run.result()
        self.assertNotEqual(again.allocation_id, domain.allocation_id)

    def test_another_request_for_the_name_is_refused_and_harms_nothing(self):
        rig = Rig(self)
        domain, run = self.lease(rig)
        run.result()
        for request in (
            {"window": 128},
            {"workers": (1, 0)},
            {"workers": (0,)},
            {"buffers": [CommBufferSpec("signal", "int32", 64, 64)]},
            {"buffers": [CommBufferSpec("other", "opaque", 64, 64)]},
        ):
            with self.refused(ValueError, "retained with another configuration"):
                self.lease(rig, **request)
        self.assertFalse(domain.freed)
        self.assertIs(self.lease(rig)[0], domain)

    def test_a_failed_run_frees_it(self):
        rig = Rig(self)
        self.lease(rig)[1].result()
        with self.assertRaises(KeyError) as caught:
            self.lease(rig, then=self.fails)
        self.assertTrue(caught.exception.domain.freed)
        domain, run = self.lease(rig, then=lambda orch, _d: rig.sub(orch, "pto_sub_fail", scalars=[1]))
        with self.refused(RuntimeError, "failed on purpose"):
            run.result()
        self.assertTrue(domain.freed)
        fresh, run = self.lease(rig)
        run.result()
        self.assertFalse(fresh.freed)

    @staticmethod
    def fails(_orch, _domain):
        raise KeyError

    def test_a_failed_run_frees_nothing_that_another_run_may_use(self):
        rig = Rig(self)
        domain, run = self.lease(rig)
        run.result()
        gate = rig.worker.create_buffer(8)
        _, held = self.lease(rig, then=lambda orch, _d: rig.sub(orch, "pto_gate", (gate, INOUT)))
        with self.assertRaises(KeyError):
            self.lease(rig, then=self.fails)
        self.assertFalse(domain.freed)
        write(gate, [1])
        held.result()
        rig.worker.close()
        self.assertTrue(domain.freed)

    def test_only_while_a_graph_is_being_built(self):
        rig = Rig(self)
        kept = []
        rig.run(kept.append)
        with self.refused(RuntimeError, "only valid while a run's graph is being built"):
            kept[0].get_or_allocate_domain(name="d", workers=[0], window_size=4)

    def test_a_released_name_starts_afresh(self):
        rig = Rig(self)
        domain, run = self.lease(rig)
        run.result()
        domain.release()
        self.assertTrue(domain.freed)
        again, run = self.lease(rig)
        run.result()
        self.assertNotEqual(again.allocation_id, domain.allocation_id)


class NativePublicRetention(StandInTest):
    """What only a runtime that ties domains to fences can do."""

    def test_a_release_waits_for_the_runs_that_the_domain_belongs_to(self):
        public()
        self.addCleanup(lambda: delattr(Orchestrator, "get_or_allocate_domain"))
        rig = Rig(self)
        gate = rig.worker.create_buffer(8)
        seen = []

        def build(orch):
            seen.append(
                orch.get_or_allocate_domain(
                    name="d", workers=[0, 1], window_size=64, buffers=signal_buffer(), retain_after_run=True
                )
            )
            rig.sub(orch, "pto_gate", (gate, INOUT))

        run = rig.submit(build)
        seen[0].release()
        self.assertEqual((seen[0].released, seen[0].freed), (True, False))
        write(gate, [1])
        run.result()
        self.assertTrue(seen[0].freed)

    def test_the_environment_or_a_prelude_turns_it_on(self):
        body = "from simpler.orchestrator import Orchestrator as O; print(hasattr(O, 'get_or_allocate_domain'))"
        for prelude, environment, expected in (
            ("", {}, "False"),
            ("", {"PTO_STANDIN_PUBLIC": "1"}, "True"),
            ("import simpler.standin; simpler.standin.public(); ", {}, "True"),
        ):
            out, _ = script(prelude + body, **environment).communicate()
            self.assertEqual(out.strip(), expected)


def _added() -> Path | None:
    """A module beside the project that adds the public call to a runtime without it, where there is one."""
    named = os.environ.get("PTO_SIMPLER_NEXT")
    places = [Path(named)] if named else [p / "shared/simpler_next/simpler_next.py" for p in ROOT.parents]
    return next((place for place in places if place.is_file()), None)


@unittest.skipUnless(_added(), "no simpler_next.py beside the project (or where PTO_SIMPLER_NEXT says)")
class AddedPublicRetention(PublicRetention):
    """The same rules where the call is put in through the private hooks."""

    def install(self) -> None:
        finalize = Worker._finalize_run_handle
        self.addCleanup(lambda: setattr(Worker, "_finalize_run_handle", finalize))
        spec = importlib.util.spec_from_file_location("simpler_next", _added())
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.assertTrue(module.install())
        self.assertFalse(module.install())
        self.addCleanup(self.uninstall)
        self.assertIn("simpler", sys.modules)


if __name__ == "__main__":
    unittest.main()
