"""The tensors that the binding gives to generated programs, over the stand-in's memory."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import support  # noqa: F401  (finds the stand-in)
from simpler.buffer import AccessMode, create_host_shared_buffer, mint_owner_instance_id
from simpler.task_interface import DataType, TaskArgs, Tensor, TensorArgType

REPOSITORY = Path(__file__).resolve().parents[3]


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


BINDING = REPOSITORY / "crates" / "pto-simpler-sys" / "src" / "python"
tensors = load("pto_simpler_tensors", BINDING / "tensors.py")
lending = load("pto_simpler_lending", BINDING / "lending.py")
torch = load("torch_of_the_tests", REPOSITORY / "tests" / "generated" / "packages" / "torch.py")


class Gate:
    """Hands out memory as the binding's gate does."""

    def __init__(self):
        self.owner, self.buffers = mint_owner_instance_id(), []

    def buffer(self, nbytes):
        self.buffers.append(create_host_shared_buffer(nbytes, self.owner, len(self.buffers) + 1))
        return self.buffers[-1], self.buffers[-1].base, self.buffers[-1]

    def check(self):
        pass


class Tensors(unittest.TestCase):
    def setUp(self):
        self.gate = Gate()
        self.buffer, address, _ = self.gate.buffer(4 * 64)
        self.x = tensors.over(self.buffer, [4, 16], DataType.INT32, 0, 4, address, True)
        for i in range(4):
            for j in range(16):
                self.x[i, j] = 16 * i + j

    def tearDown(self):
        tensors.allocators.stack.clear()
        for buffer in self.gate.buffers:
            buffer.close()

    def test_rows_are_tensors_of_the_runtime(self):
        for part, shape, offset in [
            (self.x[1:3], [2, 16], 64),
            (self.x[2], [16], 128),
            (self.x[-1, 4:12], [8], 208),
            (self.x[0:1, 0:8], [1, 8], 0),
            (self.x[..., 2, 3], [1], 140),
            (self.x[1:9], [3, 16], 64),
        ]:
            self.assertIsInstance(part, Tensor)
            self.assertEqual((list(part.shapes), part.byte_offset), (shape, offset))
            self.assertEqual(list(part.strides), list(tensors.row_major(shape)))
            TaskArgs().add_tensor(part, TensorArgType.INPUT)
        self.assertEqual((self.x[2, 3].shape, int(self.x[2, 3]), self.x[2, 3].item()), ((), 35, 35))

    def test_what_no_task_can_take_says_so(self):
        for part, shape, says in [
            (self.x[0:4, 0:8], (4, 8), "not contiguous"),
            (self.x[0:4:2], (2, 16), "not contiguous"),
            (self.x[2:2], (0, 16), "no elements"),
            (self.x[9:], (0, 16), "no elements"),
            (self.x[3:1, 0:4], (0, 4), "no elements"),
            (self.x.reshape(1, 1, 1, 1, 4, 16), (1, 1, 1, 1, 4, 16), "6 dimensions"),
        ]:
            self.assertNotIsInstance(part, Tensor)
            self.assertEqual(part.shape, shape)
            with self.assertRaisesRegex(ValueError, says):
                part.dtype
            with self.assertRaises(TypeError):
                TaskArgs().add_tensor(part, TensorArgType.INPUT)

    def test_indices_are_those_of_the_language(self):
        for index, error in [
            (True, TypeError),
            ("a", TypeError),
            ([0, 1], TypeError),
            (None, TypeError),
            ((0, 0, 0), IndexError),
            (4, IndexError),
            (-5, IndexError),
            ((..., ...), IndexError),
            (slice(None, None, -1), ValueError),
        ]:
            with self.assertRaises(error, msg=str(index)):
                self.x[index]

    def test_parts_are_assigned_as_tensors_broadcast(self):
        before = self.x.tolist()
        self.x[0:2, 0:8] = self.x[2:4, 8:16]
        self.assertEqual([row[:8] for row in self.x.tolist()[:2]], [row[8:] for row in before[2:]])
        self.x[1:3] = self.x[0:2]  # one over the other
        self.assertEqual(self.x[2].tolist()[8:], before[1][8:])
        self.x[0:4, 3:5] = self.x[3, 0:2]
        self.assertEqual([row[3:5] for row in self.x.tolist()], [before[3][:2]] * 4)
        self.x[0:1, 0:4] = self.x[3, 0:4]
        self.x[0, 4:8] = self.x[3:4, 4:8]
        self.assertEqual(self.x[0].tolist()[:3], before[3][:3])
        self.x[:, 0] = 7
        self.assertEqual([row[0] for row in self.x.tolist()], [7] * 4)
        self.x[2:2] = self.x[3:3]
        for to, value in [(slice(0, 2), self.x[0:3]), (0, self.x[0:2]), (slice(0, 1), self.x[0, 0:5])]:
            with self.assertRaises(ValueError):
                self.x[to] = value
        for value in ["a", None, torch.zeros((16,), dtype=torch.int64), torch.zeros((16,), dtype=torch.float32)]:
            with self.assertRaises(TypeError):
                self.x[0] = value

    def test_a_read_only_argument_and_device_memory_are_not_assigned(self):
        read_only = tensors.over(self.buffer, [64], DataType.INT32, 0, 4, self.buffer.base, False)
        with self.assertRaisesRegex(TypeError, "read-only"):
            read_only[0] = 1
        self.x[0, 0:4] = read_only[8:12]
        device = tensors.over(self.buffer, [64], DataType.INT32, 0, 4, None, False)
        for use in (lambda: device[0].item(), device.data_ptr, lambda: device.fill_(0)):
            with self.assertRaisesRegex(TypeError, "device memory"):
                use()
        self.assertEqual(device[8:16].byte_offset, 32)

    def test_numbers_of_every_type_are_packed(self):
        for name, value in [("FLOAT32", -1.5), ("FLOAT16", 0.25), ("BFLOAT16", -2.5), ("INT8", -3), ("UINT64", 2**63)]:
            dtype = getattr(DataType, name)
            size = {"FLOAT32": 4, "FLOAT16": 2, "BFLOAT16": 2, "INT8": 1, "UINT64": 8}[name]
            it = tensors.over(self.buffer, [4], dtype, 0, size, self.buffer.base, True)
            it.fill_(value)
            self.assertEqual(it.tolist(), [value] * 4, name)
        nan = tensors.over(self.buffer, [1], DataType.BFLOAT16, 0, 2, self.buffer.base, True)
        nan[0] = float("nan")
        self.assertNotEqual(nan[0].item(), nan[0].item())

    def test_what_is_stored_during_a_call_moves_to_shared_memory(self):
        stored = lending.Tensors({"x": self.x})
        stored["outside"] = made = torch.zeros((2,), dtype=torch.int32)
        self.assertIs(stored["outside"], made)
        tensors.allocators.stack.append(lending.Allocator(self.gate))
        stored["t"] = torch.zeros((3, 4), dtype=torch.int32)
        stored.setdefault("s", torch.zeros((2,), dtype=torch.int64))
        stored.update(u=torch.zeros((2,), dtype=torch.float32))
        stored |= {"w": torch.zeros((2,), dtype=torch.int8)}
        for key in "tsuw":
            self.assertIsInstance(stored[key], Tensor, key)
        self.assertEqual(stored["t"].tolist(), [[0] * 4] * 3)
        stored["t"][1] = self.x[1, 0:4]
        self.assertEqual(stored["t"].tolist()[1], [16, 17, 18, 19])
        stored["none"], stored["number"] = torch.zeros((0, 4), dtype=torch.int32), 5
        self.assertEqual((stored["none"].shape, stored["number"]), ((0, 4), 5))
        dense = self.x[0:4, 0:8].contiguous()
        self.assertIsInstance(dense, Tensor)
        self.assertEqual(dense.tolist(), [row[:8] for row in self.x.tolist()])

    def test_what_exists_before_the_start_keeps_one_identity_per_storage(self):
        owned = tensors.Owned()
        tensor, other = torch.zeros((8,), dtype=torch.int32), torch.zeros((8,), dtype=torch.int32)
        again, [same, unlike], number = owned.adopted(tensor), owned.adopted([tensor, other]), owned.adopted(5)
        self.assertEqual(again.buffer.identity, same.buffer.identity)
        self.assertNotEqual(again.buffer.identity, unlike.buffer.identity)
        self.assertEqual((number, again.buffer.access), (5, AccessMode.READWRITE))
        again[2:6] = self.x[1, 0:4]
        self.assertEqual(same.tolist(), [0, 0, 16, 17, 18, 19, 0, 0])
        self.x[3, 0:8] = tensor
        self.assertEqual(self.x[3].tolist()[:8], same.tolist())

    def test_what_torch_made_of_an_argument_is_still_the_argument(self):
        class OfTorch:
            shape, dtype, device = (2, 8), torch.int32, None
            address = self.x.data_ptr() + 64

            def data_ptr(self):
                return self.address

            def stride(self):
                return (16, 1)

            def is_contiguous(self):
                return False

        allocator = lending.Allocator(self.gate, [self.x._home])
        tensors.allocators.stack.append(allocator)
        part = tensors.copied(OfTorch())
        part.fill_(9)
        self.assertEqual(self.x[1:3, 0:8].tolist(), [[9] * 8] * 2)
        self.assertEqual(len(self.gate.buffers), 1)

    def test_without_torch_a_tensor_says_what_it_lacks(self):
        with self.assertRaisesRegex(AttributeError, "no 'unsqueeze'"):
            self.x.unsqueeze(0)

    def test_a_stacked_tensor_gives_whole_parts(self):
        stacked = tensors.Stacked([self.x[0:2], self.x[2:4]])
        self.assertEqual((stacked.shape, len(stacked)), ((2, 2, 16), 2))
        for index in (1, (1, slice(0, 2), slice(0, 16)), (1, ...), (1, slice(None))):
            self.assertEqual(stacked[index].byte_offset, 128)
        for index, error in [
            ((0, slice(0, 1)), ValueError),
            ((0, 0), ValueError),
            (-1, IndexError),
            (2, IndexError),
            (slice(0, 1), TypeError),
            (True, TypeError),
        ]:
            with self.assertRaises(error, msg=str(index)):
                stacked[index]
        with self.assertRaises(ValueError):
            tensors.Stacked([self.x[0:2], self.x[0:1]])

    def test_after_the_call_nothing_is_looked_at(self):
        part = self.x[1]
        self.x._home.gone = True
        for use in (lambda: part[0].item(), part.data_ptr, lambda: part.fill_(1), lambda: self.x.tolist()):
            with self.assertRaisesRegex(RuntimeError, "after the call"):
                use()


if __name__ == "__main__":
    unittest.main()
