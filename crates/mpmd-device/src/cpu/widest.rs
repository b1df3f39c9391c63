//! Functions that are compiled for several widths of vectors.

/// Defines a function that calls another function, in an AVX2 variant if the width allows.
///
/// The other function is `#[inline(always)]`, and so is what it calls: else these parts would have
/// one variant alone. Neither variant fuses products and sums, or changes their order, so both give
/// the same bits.
macro_rules! widest {
    (
        $(#[$attribute:meta])*
        $visible:vis fn $name:ident = $function:ident($($argument:ident: $of:ty),* $(,)?)
        $(-> $result:ty)?
    ) => {
        $(#[$attribute])*
        $visible fn $name($($argument: $of),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn with_avx2($($argument: $of),*) $(-> $result)? {
                    $function($($argument),*)
                }

                if $crate::cpu::width() >= $crate::cpu::VectorWidth::Avx2 {
                    // SAFETY: the processor has the instructions of this width.
                    return unsafe { with_avx2($($argument),*) };
                }
            }
            $function($($argument),*)
        }
    };
}

pub(crate) use widest;
