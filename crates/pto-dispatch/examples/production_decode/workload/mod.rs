//! A program made from domain requests alone: a sharded step whose partial results travel through every data buffer.
//!
//! Nobody needs the real kernels to exercise a program's domains. Here every data buffer of the request is the place
//! of one *exchange*: a matrix-vector product `y = W x` whose rows of `x` are sharded over the chips, so that each
//! chip has a partial sum of every element of `y`. The partial sums go round the ring of chips:
//!
//! 1. The elements of a buffer are cut into one chunk per rank. Rank `r` writes its partial sum of chunk `r` into
//!    the buffer *of rank `r + 1`*.
//! 2. Each rank takes the chunk that has just arrived in its own buffer, adds its own partial sum, and writes it
//!    into the buffer of the next rank.
//! 3. After as many hops as there are ranks, chunk `r` is complete and back in the buffer of rank `r`, which copies
//!    it out as its result.
//!
//! So every byte of every data buffer is written by a peer exactly once per request and read again.
//!
//! **Order.** Within a domain, data buffer `i` is guarded by signal buffer `i mod S`: the writer adds 1 to *its* cell
//! (four bytes at `4 * rank`) of the owner's signal buffer, and the owner waits for it. A domain without (usable)
//! signals takes one run per hop instead: the builder copies what a rank has so far into that rank's buffer, and the
//! kernel of the next rank reads it there, a run later.
//!
//! **Freshness.** Where the window is promised to be zero (allocated for this dispatch, or reset), the program trusts
//! that: it counts signals from 0 and *adds* into data buffers. Where windows keep their contents (persistent, reset
//! off), it counts signals from what earlier epochs have left and overwrites. A program that trusts and is not
//! given fresh windows reads sums of old and new results, whatever the timing: that is what `--stale` shows.
//!
//! [`plan`] turns a fixture into numbers, [`model`] defines the arithmetic, [`kernel`] is what chips execute,
//! [`program`] is the graph builder, [`reference`] computes the same step on one chip and compares.

pub(crate) mod kernel;
pub(crate) mod model;
pub(crate) mod plan;
pub(crate) mod program;
pub(crate) mod reference;
