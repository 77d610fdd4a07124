"""Call configuration, enumerations, callables and artefacts as plain values (contract section 3.3)."""

import ctypes
import json
import unittest

import support  # noqa: F401 -- puts the package on the path

from simpler import task_interface as ti
from simpler.buffer import mint_owner_instance_id, wrap_fork_inherited
from simpler.standin import SIGNATURES, ChipKernel, descriptor, kernel_names, load


class Values(unittest.TestCase):
    def test_wire_numbers(self):
        names = "FLOAT32 FLOAT16 INT32 INT16 INT8 UINT8 BFLOAT16 INT64 UINT64 UINT16 UINT32".split()
        self.assertEqual([ti.DataType[n].value for n in names], list(range(11)))
        tags = "INPUT OUTPUT INOUT OUTPUT_EXISTING NO_DEP".split()
        self.assertEqual([ti.TensorArgType[n].value for n in tags], list(range(5)))
        sizes = [ti.get_element_size(ti.DataType[n]) for n in names]
        self.assertEqual(sizes, [4, 2, 4, 2, 1, 1, 2, 8, 8, 2, 4])

    def test_scalars_become_their_bits(self):
        for value, bits in ((-1, 2**64 - 1), (1.0, 0x3F800000), (ctypes.c_double(1.0), 0x3FF << 52), (True, 1)):
            self.assertEqual(ti.scalar_to_uint64(value), bits)

    def test_call_configuration(self):
        config = ti.CallConfig()
        self.assertEqual((config.aicpu_thread_num, config.output_prefix), (0, ""))
        self.assertEqual(config.runtime_env.ring_heap, [0] * 4)
        config.runtime_env.ring_heap = 4096
        config.runtime_env.ring_task_window = [4, 8, 16, 0]
        self.assertEqual(config.runtime_env.ring_heap, [4096] * 4)
        config.validate()
        with self.assertRaises(AttributeError):
            config.foo = 1
        for name, wrong in (("ring_heap", [1, 2, 3]), ("ring_heap", [-1, 0, 0, 0]), ("ring_dep_pool", "x")):
            with self.assertRaises(ValueError):
                setattr(config.runtime_env, name, wrong)
        for name, invalid in (("ring_heap", 5), ("ring_task_window", 3), ("ring_dep_pool", 1)):
            other = ti.CallConfig()
            setattr(other.runtime_env, name, invalid)
            with self.assertRaisesRegex(ValueError, name):
                other.validate()
        config.enable_chip_swimlane = True
        with self.assertRaisesRegex(ValueError, "output_prefix must be set"):
            config.validate()
        config.output_prefix = "x"
        config.validate()

    def test_an_owner_nonce_has_eight_bytes(self):
        self.assertEqual(len(mint_owner_instance_id()), 8)
        with self.assertRaisesRegex(ValueError, "must be 8 bytes"):
            wrap_fork_inherited(4096, 4, b"x" * 16, 1)

    def test_chip_callables_travel_as_bytes(self):
        core = ti.CoreCallable.build(signature=[ti.ArgDirection.IN], binary=b"k")
        one = ti.ChipCallable.build([ti.ArgDirection.OUT], "f", b"\0\xffbin", [(3, core)], "f_config")
        two = ti.ChipCallable.from_bytes(ctypes.string_at(one.buffer_ptr(), one.buffer_size()))
        self.assertEqual((two.func_name, two.config_name, two.binary_size), ("f", "f_config", 5))
        self.assertEqual((two.sig_count, two.sig(0)), (1, ti.ArgDirection.OUT))
        self.assertEqual((two.child_count, two.child_func_id(0)), (1, 3))
        self.assertEqual(two.child(0).binary_size, 1)

    def test_artefacts_name_kernels(self):
        for name in kernel_names():
            described = json.loads(descriptor(name))
            self.assertEqual((described["tensors"], described["scalars"]), SIGNATURES[name])
            self.assertEqual(load(descriptor(name)).sig_count, len(described["tensors"]))
        self.assertEqual(ChipKernel("pto_store", ["OUT", "IN"], 2).sig_count, 2)
        with self.assertRaises(ValueError):
            load(b"{}")

    def test_the_portable_set_is_complete(self):
        portable = "store add copy signal await handshake peek rank fail".split()
        self.assertLessEqual({f"pto_{n}" for n in portable}, set(kernel_names()))


if __name__ == "__main__":
    unittest.main()
