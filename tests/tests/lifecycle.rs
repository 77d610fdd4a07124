//! The lifecycle suite on the emulator: every public operation in random order, compared with the reference model,
//! with the invariants I1-I14 asserted after each step.

use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};
use pto_mock::lifecycle::{Lifecycle, Model, config};

proptest::proptest! {
    #![proptest_config(config(4000))]

    #[test]
    fn every_sequence_of_operations_answers_as_designed(
        (world, transitions, seen) in Model::sequential_strategy(1..40)
    ) {
        Lifecycle::test_sequential(config(4000), world, transitions, seen);
    }
}
