"""Copies, resident device memory, scratch and host Buffers (contract sections 3.2 and 3.4)."""

import os
import unittest

from support import INOUT, INT32, OUT, Background, Rig, StandInTest, until, words, write

from simpler.buffer import (
    AccessMode,
    AddressSpace,
    BackendKind,
    CanonicalIdentity,
    mint_owner_instance_id,
    wrap_vmm_window,
)
from simpler.standin import inject
from simpler.task_interface import CommBufferSpec, TaskArgs


class Copies(StandInTest):
    def test_the_host_side_gives_the_length_and_the_rest_stays(self):
        rig = Rig(self)
        device = rig.worker.alloc_child_tensor(1, (4,), INT32)
        whole, part = rig.worker.create_buffer(16), rig.worker.create_buffer(8)
        write(whole, [1, 2, 3, 4])
        rig.worker.copy_to(device, whole)
        write(part, [-1, -2])
        rig.worker.copy_to(device, part)
        write(whole, [0] * 4)
        rig.worker.copy_from(whole, device)
        self.assertEqual(words(whole), [-1, -2, 3, 4])
        rig.worker.copy_from(part, device)
        self.assertEqual(words(part), [-1, -2])
        rig.worker.free(device)

    def test_every_refusal_of_the_table(self):
        rig = Rig(self)
        worker = rig.worker
        device, host = worker.alloc_child_tensor(0, (4,), INT32), worker.create_buffer(16)
        big = worker.create_buffer(2048)
        for call, error, text in (
            (lambda: worker.copy_to(device, big), ValueError, "2048 bytes exceeds the 16-byte backing"),
            (lambda: worker.copy_from(big, device), ValueError, "2048 bytes exceeds the 16-byte backing"),
            (lambda: worker.copy_to(device, bytearray(4)), TypeError, "must be a Buffer from create_buffer"),
            (lambda: worker.copy_to(device, b"ab"), TypeError, "writable buffer"),
            (lambda: worker.copy_to(host, host), ValueError, "expected a DEVICE handle, got HOST"),
            (lambda: worker.copy_to(device, device), ValueError, "must be a HOST handle, got DEVICE"),
        ):
            with self.refused(error, text):
                call()
        worker.free(device)
        with self.refused(ValueError, "not contained in a live allocation"):
            worker.copy_to(device, host)

    def test_a_chip_may_not_reach_another_ones_memory(self):
        rig = Rig(self)
        mine = rig.worker.alloc_child_tensor(0, (4,), INT32)
        for _ in range(2):
            rig.worker.alloc_child_tensor(1, (4,), INT32)
        theirs = wrap_vmm_window(mine.base + 0x5000, 16, mint_owner_instance_id(), 99, owner_worker_id=0)
        with self.refused(ValueError, "not contained in a live allocation on worker 0"):
            rig.worker.copy_to(theirs, rig.worker.create_buffer(16))

    def test_interior_destinations_pass_up_to_the_end_of_the_window(self):
        rig = Rig(self)
        source, seen = rig.worker.create_buffer(8), rig.worker.create_buffer(64)
        write(source, [7, 8])
        domain = rig.retained()
        base = domain[1].local_window_base

        def inside(offset):
            return wrap_vmm_window(base + offset, 8, mint_owner_instance_id(), 99, owner_worker_id=1)

        rig.worker.copy_to(inside(24), source)
        rig.worker.copy_from(seen, domain[1].buffers["signal"])
        self.assertEqual(words(seen)[6:8], [7, 8])
        rig.worker.copy_to(inside(56), source)
        with self.refused(ValueError, "not contained in a live allocation"):
            rig.worker.copy_to(inside(57), source)

    def test_a_failed_copy_carries_the_childs_words(self):
        rig = Rig(self)
        device = rig.worker.alloc_child_tensor(0, (1,), INT32)
        inject("copy_to", chip=0, text="copy went wrong")
        with self.refused(RuntimeError, "copy went wrong"):
            rig.worker.copy_to(device, rig.worker.create_buffer(4))
        rig.worker.copy_to(device, rig.worker.create_buffer(4))


class Resident(StandInTest):
    def test_addresses_are_per_chip_and_may_be_equal(self):
        rig = Rig(self)
        one, two = (rig.worker.alloc_child_tensor(chip, (4,), INT32) for chip in (0, 1))
        self.assertEqual(one.base, two.base)
        host = rig.worker.create_buffer(16)
        write(host, [5] * 4)
        rig.worker.copy_to(one, host)
        rig.worker.copy_from(host, two)
        self.assertEqual(words(host), [0] * 4)

    def test_bad_ids_double_frees_and_foreign_buffers_are_refused(self):
        rig = Rig(self)
        worker = rig.worker
        with self.refused(IndexError, r"worker_id 9 out of range \(have 2 chips\)"):
            worker.alloc_child_tensor(9, (4,), INT32)
        with self.refused(IndexError, "worker_id 9 out of range"):
            worker.committed_device_memory(9)
        with self.refused(TypeError, "L2-only"):
            worker.malloc(4)
        device = worker.alloc_child_tensor(0, (4,), INT32)
        worker.free(device)
        domain = rig.retained()
        for buffer in (device, domain[0].buffers["signal"], worker.create_buffer(4)):
            with self.refused(ValueError, "not a live malloc base"):
                worker.free(buffer)

    def test_committed_memory_counts_what_was_given_out(self):
        rig = Rig(self)
        before = rig.worker.committed_device_memory(1)
        device = rig.worker.alloc_child_tensor(1, (1000,), INT32)
        self.assertEqual(rig.worker.committed_device_memory(1) - before, 4000)
        rig.run(lambda orch: self.assertEqual(orch.committed_device_memory(1) - before, 4000))
        rig.worker.free(device)
        self.assertEqual(rig.worker.committed_device_memory(1), before)

    def test_in_a_callback_memory_lives_on_after_the_run(self):
        rig = Rig(self)
        made, host = [], rig.worker.create_buffer(16)
        write(host, [1, 2, 3, 4])

        def build(orch):
            made.append(orch.alloc_child_tensor(0, (4,), INT32))
            orch.copy_to(made[0], host)
            rig.task(orch, "pto_add", (made[0], INOUT), scalars=[10])

        rig.run(build)
        rig.worker.copy_from(host, made[0])
        self.assertEqual(words(host), [11, 12, 13, 14])
        rig.run(lambda orch: orch.free(made[0]))


class Scratch(StandInTest):
    def test_it_carries_results_between_children_and_goes_with_the_run(self):
        rig = Rig(self)
        out = rig.worker.create_buffer(16)
        places = []

        def build(orch):
            scratch = orch.alloc((4,), INT32)
            places.append(scratch.base)
            self.assertEqual(scratch.backend_kind, BackendKind.FORK_SHM)
            rig.task(orch, "pto_store", (scratch, INOUT), scalars=[5], chip=0)
            rig.task(orch, "pto_add", (scratch, INOUT), scalars=[100], chip=1)
            rig.sub(orch, "pto_sub_add", (scratch, INOUT), scalars=[1000])
            rig.task(orch, "pto_copy", (scratch, INOUT), (out, OUT), chip=0)

        for _ in range(2):
            rig.run(build)
            self.assertEqual(words(out), [1105, 1106, 1107, 1108])
        self.assertEqual(places[0], places[1])

    def test_a_full_heap_is_an_error_and_the_room_comes_back(self):
        rig = Rig(self, heap_ring_size=1 << 20)
        with self.refused(RuntimeError, "no room for"):
            rig.submit(lambda orch: [orch.alloc((1 << 16,), INT32) for _ in range(5)])
        rig.run(lambda orch: [orch.alloc((1 << 16,), INT32) for _ in range(4)])


class HostBuffers(StandInTest):
    def test_new_ones_are_zero_linked_and_page_aligned(self):
        rig = Rig(self)
        buffer = rig.worker.create_buffer(100)
        self.assertEqual((buffer.nbytes, bytes(buffer.shm.buf[:100])), (100, bytes(100)))
        self.assertEqual(buffer.base % 4096, 0)
        self.assertTrue(os.path.exists(f"/dev/shm/{buffer.shm.name}"))
        self.assertIsInstance(buffer.identity, CanonicalIdentity)
        self.assertEqual((buffer.address_space, buffer.access), (AddressSpace.HOST, AccessMode.READWRITE))
        self.assertFalse(buffer.closed)
        for nbytes in (0, -1):
            with self.refused(ValueError, "must be positive"):
                rig.worker.create_buffer(nbytes)

    def test_it_is_not_control_and_legal_at_any_time(self):
        rig = Rig(self)
        run = rig.hold(rig.worker.create_buffer(4))
        buffer = rig.worker.create_buffer(4)

        def build(orch):
            other = rig.worker.create_buffer(4)
            rig.task(orch, "pto_store", (other, OUT), scalars=[1])
            rig.worker.create_buffer(4)

        second = rig.submit(build)
        rig.open()
        run.result()
        second.result()
        rig.worker.release_buffer(buffer)

    def test_release_is_refused_while_a_task_names_it_and_repeatable_after(self):
        rig = Rig(self)
        out = rig.worker.create_buffer(4)
        run = rig.hold(out)
        with self.refused(RuntimeError, "still referenced by an in-flight run"):
            rig.worker.release_buffer(out)
        rig.open()
        run.result()
        rig.worker.release_buffer(out)
        rig.worker.release_buffer(out)
        self.assertTrue(out.closed)
        with self.refused(ValueError, "released buffer"):
            out.tensor((1,), INT32)

    def test_release_waits_for_a_busy_child(self):
        rig = Rig(self)
        run = rig.hold(rig.worker.create_buffer(4))
        release = Background(lambda: rig.worker.release_buffer(rig.worker.create_buffer(4)))
        until(lambda: release.inside("control_all"))
        rig.open()
        release.finish()
        run.result()

    def test_buffers_used_by_copies_alone_are_not_tracked(self):
        rig = Rig(self)
        device, host = rig.worker.alloc_child_tensor(0, (1,), INT32), rig.worker.create_buffer(4)
        run = rig.submit(lambda orch: orch.copy_to(device, host))
        rig.worker.release_buffer(host)
        run.result()

    def test_an_exported_view_keeps_the_mapping_and_not_the_name(self):
        rig = Rig(self)
        buffer = rig.worker.create_buffer(8)
        name, view = buffer.shm.name, buffer.shm.buf[:4]
        with self.assertRaises(BufferError):
            rig.worker.release_buffer(buffer)
        self.assertFalse(os.path.exists(f"/dev/shm/{name}"))
        view.release()
        rig.worker.release_buffer(buffer)

    def test_a_released_one_cannot_be_reached_by_a_later_task(self):
        rig = Rig(self)
        buffer = rig.worker.create_buffer(4)
        tensor = buffer.tensor((1,), INT32)
        rig.worker.release_buffer(buffer)

        def build(orch):
            args = TaskArgs()
            args.add_tensor(tensor, OUT)
            args.add_scalar(1)
            orch.submit_next_level(rig.handles["pto_store"], args, worker=0)

        with self.refused(RuntimeError, "does not exist: its owner has released"):
            rig.run(build)
        # Decoding failed, not the chip: its run lane is sound.
        rig.one("pto_store", (rig.worker.create_buffer(4), OUT), scalars=[1]).result()

    def test_a_worker_without_children_makes_none(self):
        rig = Rig(self, chips=0, subs=0)
        with self.refused(RuntimeError, "at least one forked"):
            rig.worker.create_buffer(4)

    def test_window_buffers_know_their_owner(self):
        rig = Rig(self)
        domain = rig.retained(window=32, buffers=[CommBufferSpec("x", "o", 8, 8)])
        buffer = domain[1].buffers["x"]
        self.assertEqual((buffer.owner_worker_id, buffer.address_space), (1, AddressSpace.DEVICE))


if __name__ == "__main__":
    unittest.main()
