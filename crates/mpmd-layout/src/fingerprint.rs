//! Hashes that are the same on every process and in every run, unlike the standard library's.

/// Builder of a 64-bit fingerprint of numbers and texts. The order in which they are mixed in
/// matters.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// Creates the fingerprint of an empty value of this kind. Values of different kinds start from
    /// different states.
    #[doc(hidden)]
    pub fn new(kind: &str) -> Self {
        let mut fingerprint = Self(0);
        fingerprint.text(kind);
        fingerprint
    }

    /// Mixes a number into the fingerprint.
    #[doc(hidden)]
    pub fn word(&mut self, word: u64) {
        // Each step is invertible, so for a given state two different words never give the same
        // state.
        let mut x = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        self.0 = (x ^ (x >> 32)).wrapping_add(0xa076_1d64_78bd_642f);
    }

    /// Mixes the length of a list and its numbers into the fingerprint.
    #[doc(hidden)]
    pub fn words(&mut self, words: impl ExactSizeIterator<Item = u64>) {
        self.word(words.len() as u64);
        words.for_each(|word| self.word(word));
    }

    /// Mixes the length and the bytes of a text into the fingerprint.
    #[doc(hidden)]
    pub fn text(&mut self, text: &str) {
        self.word(text.len() as u64);
        for chunk in text.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }

    /// Returns the fingerprint of all values mixed in so far.
    #[doc(hidden)]
    pub fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> u64 {
        let mut fingerprint = Fingerprint::new("test");
        texts.iter().for_each(|text| fingerprint.text(text));
        fingerprint.finish()
    }

    #[test]
    fn boundaries_and_order_change_the_fingerprint() {
        let all = [
            of(&["ab", "c"]),
            of(&["a", "bc"]),
            of(&["c", "ab"]),
            of(&["abc"]),
            of(&["abc", ""]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{i}");
        }
    }

    #[test]
    fn fingerprint_value_is_fixed() {
        // Processes of different builds compare these values: a change must also change the wire
        // version.
        let mut fingerprint = Fingerprint::new("mesh");
        fingerprint.words([1, u64::MAX].into_iter());
        fingerprint.text("model parallel");
        assert_eq!(fingerprint.finish(), 2_426_330_832_985_126_161);
    }
}
