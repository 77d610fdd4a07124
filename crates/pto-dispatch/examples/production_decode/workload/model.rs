//! The arithmetic: wrapping 32-bit words, little-endian, so that results are exact on every machine.
//!
//! A buffer whose size is not a multiple of four ends in a shortened word of which only the low bytes exist. The low
//! bytes of a sum depend on the low bytes of its terms alone, so nothing else has to know.

/// Bytes per element.
pub(crate) const WORD: u64 = 4;

/// Rows of the step that each chip owns.
pub(crate) const ROWS_PER_CHIP: usize = 4;

/// Multiplier of the weights' hash: 2^32 over the golden ratio, odd.
const SPREAD: u32 = 0x9E37_79B1;

/// The weight of one row at element `index`; `salt` names the row.
pub(crate) fn weight(salt: u32, index: u32) -> u32 {
    let hash = (index ^ salt).wrapping_mul(SPREAD);
    hash ^ (hash >> 15)
}

/// Names row `row` of exchange `exchange`.
pub(crate) fn salt(exchange: u64, row: usize) -> u32 {
    scramble((exchange << 32) | row as u64)
}

/// Element `row` of the input vector of the request named by `seed`; odd, so that no row is without effect.
pub(crate) fn input(seed: u64, row: usize) -> u32 {
    scramble(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ row as u64) | 1
}

/// The finisher of SplitMix64, upper half.
fn scramble(value: u64) -> u32 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 32) as u32
}

/// Replaces every word; the last one may be shortened.
pub(crate) fn map_words(bytes: &mut [u8], mut f: impl FnMut(u32, u32) -> u32) {
    let mut index = 0;
    let mut words = bytes.chunks_exact_mut(WORD as usize);
    for word in &mut words {
        let value = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        word.copy_from_slice(&f(index, value).to_le_bytes());
        index += 1;
    }
    let rest = words.into_remainder();
    if !rest.is_empty() {
        let mut word = [0; WORD as usize];
        word[..rest.len()].copy_from_slice(rest);
        let new = f(index, u32::from_le_bytes(word)).to_le_bytes();
        let len = rest.len();
        rest.copy_from_slice(&new[..len]);
    }
}

/// Adds `other`, word by word, to as many bytes of `bytes`.
pub(crate) fn add_words(bytes: &mut [u8], other: &[u8]) {
    let mut a = bytes.chunks_exact_mut(WORD as usize);
    let mut b = other.chunks_exact(WORD as usize);
    for (to, from) in (&mut a).zip(&mut b) {
        let sum = u32::from_le_bytes([to[0], to[1], to[2], to[3]])
            .wrapping_add(u32::from_le_bytes([from[0], from[1], from[2], from[3]]));
        to.copy_from_slice(&sum.to_le_bytes());
    }
    let from = b.remainder();
    map_words(a.into_remainder(), |_, value| {
        let mut word = [0; WORD as usize];
        word[..from.len()].copy_from_slice(from);
        value.wrapping_add(u32::from_le_bytes(word))
    });
}

/// One chip's rows of an exchange: input element and salt of each.
pub(crate) type Rows = [(u32, u32); ROWS_PER_CHIP];

/// Adds a chip's partial sums to the elements from `first` on.
pub(crate) fn add_partial(bytes: &mut [u8], rows: &Rows, first: u32) {
    map_words(bytes, |index, value| {
        let element = first.wrapping_add(index);
        rows.iter().fold(value, |sum, (x, salt)| sum.wrapping_add(x.wrapping_mul(weight(*salt, element))))
    });
}
