//! cuRAND, as far as candle needs it: a generator that every device has, and never draws from.

use crate::entry::{Out, blas};
use crate::error::Code;
use crate::handles::Handle;

/// The handle of every generator.
const GENERATOR: Handle = 1;

blas! {
    /// Returns a generator.
    fn curandCreateGenerator(generator: Out<Handle>, kind: u32) {
        let _ = kind;
        generator.set(GENERATOR)
    }
}

blas! {
    /// Accepts a seed.
    fn curandSetPseudoRandomGeneratorSeed(generator: Handle, seed: u64) {
        let _ = seed;
        known(generator)
    }
}

blas! {
    /// Accepts a stream.
    fn curandSetStream(generator: Handle, stream: Handle) {
        let _ = stream;
        known(generator)
    }
}

blas! {
    /// Accepts the end of a generator.
    fn curandDestroyGenerator(generator: Handle) {
        known(generator)
    }
}

/// Fails with `CURAND_STATUS_NOT_INITIALIZED` for a handle of no generator.
fn known(generator: Handle) -> crate::error::Result {
    if generator == GENERATOR {
        Ok(())
    } else {
        Err(Code(101))
    }
}
