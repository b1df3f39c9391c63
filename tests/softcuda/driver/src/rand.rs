//! cuRAND, as far as candle needs it: a generator that every device has, and never draws from.

use crate::entry::{Out, blas};
use crate::error::Code;
use crate::handles::Handle;

/// The handle of all generators, which have no state.
const GENERATOR: Handle = 1;

blas! {
    /// Returns the handle of a generator. Generates no numbers.
    fn curandCreateGenerator(generator: Out<Handle>, kind: u32) {
        let _ = kind;
        generator.set(GENERATOR)
    }
}

blas! {
    /// Ignores the seed of a generator.
    fn curandSetPseudoRandomGeneratorSeed(generator: Handle, seed: u64) {
        let _ = seed;
        known(generator)
    }
}

blas! {
    /// Ignores the stream of a generator.
    fn curandSetStream(generator: Handle, stream: Handle) {
        let _ = stream;
        known(generator)
    }
}

blas! {
    /// Destroys a generator, which has no effect.
    fn curandDestroyGenerator(generator: Handle) {
        known(generator)
    }
}

/// Defines functions that would draw `count` numbers. They fail: programs that can draw them are
/// linked, and no test does.
macro_rules! draws {
    ($($name:ident of $value:ty, $($shape:ident)*;)*) => {$(
        blas! {
            /// Fails, since this library draws no numbers.
            fn $name(generator: Handle, out: u64, count: usize $(, $shape: $value)*) {
                let _ = (out, count $(, $shape)*);
                known(generator)?;
                Err(LAUNCH_FAILURE)
            }
        }
    )*};
}

draws! {
    curandGenerateUniform of f32,;
    curandGenerateUniformDouble of f64,;
    curandGenerateNormal of f32, mean deviation;
    curandGenerateNormalDouble of f64, mean deviation;
}

/// `CURAND_STATUS_LAUNCH_FAILURE`.
const LAUNCH_FAILURE: Code = Code(201);

/// Fails with `CURAND_STATUS_NOT_INITIALIZED` if the handle is not that of a generator.
fn known(generator: Handle) -> crate::error::Result {
    if generator == GENERATOR {
        Ok(())
    } else {
        Err(Code(101))
    }
}
