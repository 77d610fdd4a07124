"""Tasks: what is refused, kernels, dependencies and limits (contract sections 3.3 and 3.5)."""

import ctypes
import unittest

from support import IN, INOUT, INT32, NO_DEP, OUT, Rig, StandInTest, arguments, until, words, write

from simpler.buffer import AccessMode, mint_owner_instance_id, wrap_fork_inherited
from simpler.standin import library
from simpler.task_interface import DataType, TaskArgs, TensorArgType


class Refusals(StandInTest):
    def test_every_refusal_of_the_table(self):
        rig = Rig(self)
        out = rig.worker.create_buffer(4)
        store, sub = rig.handles["pto_store"], rig.handles["pto_sub_add"]
        good = arguments((out, OUT), scalars=[1])
        other = Rig(self)
        foreign = other.handles["pto_store"]

        def single(handle=store, args=good, worker=0):
            return lambda orch: orch.submit_next_level(handle, args, worker=worker)

        def group(args, workers):
            return lambda orch: orch.submit_next_level_group(store, args, workers=workers)

        for build, error, text in (
            (single(worker=9), ValueError, "target worker 9 is not a registered worker"),
            (single(worker=-1), ValueError, "non-negative"),
            (single(worker=True), TypeError, "integer NEXT_LEVEL worker id"),
            (single(worker="0"), TypeError, "integer NEXT_LEVEL worker id"),
            (single(handle=library.pto_store), TypeError, "not a ChipCallable"),
            (single(handle=None), TypeError, "expects a CallableHandle"),
            (single(handle=sub), TypeError, "cannot run LOCAL_PYTHON; expected LOCAL_CHIP"),
            (single(handle=foreign), KeyError, "does not belong to this Worker"),
            (single(args=[1]), TypeError, "expects TaskArgs"),
            (group([], []), ValueError, "must not be empty"),
            (group([good], [0, 1]), ValueError, "length must match"),
            (group([good, good], [0, 0]), ValueError, "duplicate"),
            (group([good, good], [0, 7]), ValueError, "target worker 7"),
            (group([3], [0]), TypeError, "expects TaskArgs"),
            (lambda orch: orch.submit_sub(store, good), TypeError, "cannot run LOCAL_CHIP; expected LOCAL_PYTHON"),
        ):
            with self.refused(error, text):
                rig.submit(build)
        rig.run(single())

    def test_an_unregistered_handle_is_not_live(self):
        rig = Rig(self)
        handle = rig.handles["pto_store"]
        rig.worker.unregister(handle)
        with self.refused(KeyError, "not live"):
            rig.submit(lambda orch: orch.submit_next_level(handle, arguments(scalars=[1]), worker=0))

    def test_device_tensors_stay_on_their_chip_and_off_the_host(self):
        rig = Rig(self)
        device = rig.worker.alloc_child_tensor(0, (1,), INT32)
        with self.refused(ValueError, "not a live allocation on target worker 1"):
            rig.one("pto_store", (device, OUT), scalars=[1], chip=1)
        with self.refused(ValueError, "DEVICE-space tensor"):
            rig.submit(lambda orch: rig.sub(orch, "pto_sub_add", (device, INOUT), scalars=[1]))
        rig.one("pto_store", (device, OUT), scalars=[1]).result()

    def test_arguments_that_write_what_another_uses_are_refused(self):
        rig = Rig(self)
        buffer = rig.worker.create_buffer(16)

        def pair(first, second, offset=0):
            args = TaskArgs()
            args.add_tensor(buffer.tensor((2,), INT32), first)
            args.add_tensor(buffer.tensor((2,), INT32, None, offset), second)
            return lambda orch: orch.submit_next_level(rig.handles["pto_copy"], args, worker=0)

        for tags in ((OUT, OUT), (OUT, IN), (INOUT, IN)):
            with self.refused(ValueError, "write overlapping bytes"):
                rig.submit(pair(*tags))
        rig.run(pair(OUT, OUT, offset=8))
        # The comparison looks forward only.
        rig.run(pair(IN, OUT))

    def test_access_must_be_granted(self):
        rig = Rig(self)
        rig.gates[0] = 77
        backing = wrap_fork_inherited(ctypes.addressof(rig.gates), 4, mint_owner_instance_id(), 1)
        self.assertEqual(backing.access, AccessMode.READ)
        for tag in (OUT, INOUT):
            with self.refused(ValueError, "access the backing does not grant"):
                rig.one("pto_store", (backing, tag), scalars=[1])
        out = rig.worker.create_buffer(4)
        rig.one("pto_copy", (backing, IN), (out, OUT)).result()
        self.assertEqual(words(out), [77])


class Kernels(StandInTest):
    def test_store_add_copy(self):
        rig = Rig(self)
        a, b = rig.worker.create_buffer(12), rig.worker.create_buffer(12)
        rig.one("pto_store", (a, OUT), scalars=[2**31 - 2]).result()
        self.assertEqual(words(a), [2**31 - 2, 2**31 - 1, -(2**31)])
        rig.one("pto_add", (a, INOUT), scalars=[-1]).result()
        self.assertEqual(words(a), [2**31 - 3, 2**31 - 2, 2**31 - 1])
        rig.one("pto_copy", (a, IN), (b, OUT), chip=1).result()
        self.assertEqual(words(b), words(a))

    def test_signal_await_peek_rank(self):
        rig = Rig(self, chips=3)
        domain = rig.retained(workers=(2, 0, 1))
        outs = [rig.worker.create_buffer(8) for _ in range(3)]
        word = [rig.worker.create_buffer(4) for _ in range(3)]
        rank_of = {chip: rank for rank, chip in enumerate(domain.workers)}

        def build(orch):
            for chip, context in domain.contexts.items():
                signal = context.buffers["signal"]
                rig.task(orch, "pto_signal", (signal, NO_DEP), scalars=[context.device_ctx, 8], chip=chip)
                total = 6 - (rank_of[chip] + 1)
                scalars = [context.device_ctx, 8, total]
                rig.task(orch, "pto_await", (word[chip], OUT), scalars=scalars, chip=chip)
                rig.task(orch, "pto_rank", (outs[chip], OUT), scalars=[context.device_ctx], chip=chip)

        rig.run(build)
        self.assertEqual([words(word[c])[0] for c in (2, 0, 1)], [5, 4, 3])
        self.assertEqual([words(outs[c]) for c in (2, 0, 1)], [[0, 3], [1, 3], [2, 3]])
        rig.one("pto_peek", (outs[0], OUT), scalars=[domain[0].device_ctx, 2, 8]).result()
        self.assertEqual(words(outs[0])[0], 3)

    def test_a_handshake_over_two_ranks(self):
        rig = Rig(self)
        outs = [rig.worker.create_buffer(4) for _ in range(2)]
        rig.allocate(then=lambda orch, domain: rig.handshake(orch, domain, outs))[1].result()
        self.assertEqual([words(out)[0] for out in outs], [2, 1])

    def test_an_all_reduce_as_one_group(self):
        rig = Rig(self)
        ins, outs = ([rig.worker.create_buffer(32) for _ in range(2)] for _ in range(2))
        for rank, buffer in enumerate(ins):
            write(buffer, [100 * (rank + 1) + i for i in range(8)])

        def then(orch, domain):
            args = [
                arguments((ins[c], IN), (outs[c], OUT), scalars=[0, 32, domain[c].device_ctx]) for c in domain.workers
            ]
            orch.submit_next_level_group(rig.handles["allreduce"], args, workers=list(domain.workers))

        rig.allocate(then=then)[1].result()
        for out in outs:
            self.assertEqual(words(out), [300 + 2 * i for i in range(8)])

    def test_a_sub_task_may_come_without_arguments(self):
        rig = Rig(self)
        handle = rig.worker.register(len)
        rig.run(lambda orch: orch.submit_sub(handle))

    def test_views_have_offsets_and_strides(self):
        rig = Rig(self)
        buffer = rig.worker.create_buffer(32)
        args = TaskArgs()
        args.add_tensor(buffer.tensor((2, 2), DataType.INT32, None, 8), OUT)
        args.add_scalar(5)
        rig.run(lambda orch: orch.submit_next_level(rig.handles["pto_store"], args, worker=0))
        self.assertEqual(words(buffer), [0, 0, 5, 6, 7, 8, 0, 0])


class Dependencies(StandInTest):
    def test_a_reader_waits_for_the_writer_of_its_bytes_and_others_do_not(self):
        rig = Rig(self)
        gate, out, free = (rig.worker.create_buffer(8) for _ in range(3))

        def build(orch):
            rig.sub(orch, "pto_gate", (gate, INOUT))
            rig.task(orch, "pto_copy", (gate, IN), (out, OUT), chip=0)
            rig.task(orch, "pto_store", (free, OUT), scalars=[7], chip=0)

        run = rig.submit(build)
        until(lambda: words(free) == [7, 8])
        self.assertEqual(words(out), [0, 0])
        write(gate, [5])
        run.result()
        self.assertEqual(words(out), [5, 1])

    def test_no_dep_and_disjoint_views_do_not_wait(self):
        rig = Rig(self)
        gate, out = rig.worker.create_buffer(16), rig.worker.create_buffer(8)

        def build(orch):
            rig.sub(orch, "pto_gate", (gate, INOUT))
            rig.task(orch, "pto_copy", (gate, NO_DEP), (rig.worker.create_buffer(16), OUT), chip=0)
            rig.task(orch, "pto_store", (out, OUT), scalars=[1], chip=0)

        run = rig.submit(build)
        until(lambda: words(out) == [1, 2])
        write(gate, [1])
        run.result()

    def test_a_failed_producer_takes_its_consumers_along_and_nobody_else(self):
        rig = Rig(self)
        data, out, free = (rig.worker.create_buffer(4) for _ in range(3))

        def build(orch):
            rig.sub(orch, "pto_sub_fail", (data, INOUT), scalars=[3])
            rig.task(orch, "pto_copy", (data, IN), (out, OUT))
            rig.task(orch, "pto_add", (out, INOUT), scalars=[1])
            rig.task(orch, "pto_store", (free, OUT), scalars=[8], chip=1)

        with self.refused(RuntimeError, "child failed .*sub_worker: RuntimeError: failed on purpose with code 3"):
            rig.run(build)
        self.assertEqual((words(out), words(free)), ([0], [8]))
        rig.run(lambda orch: None)

    def test_a_long_chain_of_consumers_is_cut_without_trouble(self):
        rig = Rig(self)
        data = rig.worker.create_buffer(4)

        def build(orch):
            rig.sub(orch, "pto_sub_fail", (data, INOUT), scalars=[3])
            for _ in range(2000):
                rig.task(orch, "pto_add", (data, INOUT), scalars=[1])

        with self.refused(RuntimeError, "failed on purpose"):
            rig.run(build)
        self.assertEqual(words(data), [0])


class Limits(StandInTest):
    def test_too_many_chip_arguments_fail_the_run_and_not_the_chip(self):
        rig = Rig(self)
        out = rig.worker.create_buffer(4)
        inputs = [rig.worker.create_buffer(4) for _ in range(257)]
        with self.refused(RuntimeError, "IndexError: TaskArgs: tensor capacity exceeded"):
            rig.one("pto_store", *((b, IN) for b in inputs), scalars=[1]).result()
        with self.refused(RuntimeError, "IndexError: TaskArgs: scalar capacity exceeded"):
            rig.one("pto_store", (out, OUT), scalars=range(129)).result()
        rig.one("pto_store", (out, OUT), scalars=range(3, 131)).result()
        self.assertEqual(words(out), [3])

    def test_an_argument_blob_that_does_not_fit_stops_the_dispatcher(self):
        rig = Rig(self)
        source, out = rig.worker.create_buffer(4), rig.worker.create_buffer(4)
        with self.refused(RuntimeError, "worker is stopping"):
            rig.one("pto_store", *[(source, IN)] * 1000, scalars=[1]).result()
        with self.refused(RuntimeError, "worker is stopping"):
            rig.one("pto_store", (out, OUT), scalars=[1]).result()
        rig.one("pto_store", (out, OUT), scalars=[1], chip=1).result()

    def test_too_few_arguments_crash_the_chip(self):
        rig = Rig(self)
        with self.refused(RuntimeError, r"exited before mailbox completion \(signal=11\)"):
            rig.one("pto_store", (rig.worker.create_buffer(4), OUT)).result()

    def test_task_arguments_check_themselves(self):
        rig = Rig(self)
        tensor = rig.worker.create_buffer(4).tensor((1,), INT32)
        args = TaskArgs()
        for wrong in (rig.worker.create_buffer(4), 5, None):
            with self.assertRaises(TypeError):
                args.add_tensor(wrong, TensorArgType.INPUT)
        for wrong in (-1, 1 << 64, 1.5, "1"):
            with self.assertRaises(TypeError):
                args.add_scalar(wrong)
        args.add_tensor(tensor)
        args.add_scalar((1 << 64) - 1)
        with self.refused(RuntimeError, "cannot add tensor after scalar"):
            args.add_tensor(tensor)
        self.assertEqual((args.tensor_count(), args.scalar_count(), args.tag(0)), (1, 1, TensorArgType.INPUT))
        with self.assertRaises(IndexError):
            args.tensor(1)

    def test_tensors_check_themselves(self):
        rig = Rig(self)
        buffer = rig.worker.create_buffer(64)
        for view in (
            ((0,), INT32),
            ((), INT32),
            ((1,) * 6, INT32),
            ((17,), INT32),
            ((4,), INT32, (0,)),
            ((4,), INT32, None, 2),
            ((4,), INT32, None, 64),
            ((4,), 99),
        ):
            with self.assertRaises(ValueError, msg=view):
                buffer.tensor(*view)
        view = buffer.tensor((2, 3), DataType.INT16, None, 2)
        self.assertEqual((view.shapes, view.strides, view.dtype, view.byte_offset), ((2, 3), (3, 1), 3, 2))


if __name__ == "__main__":
    unittest.main()
