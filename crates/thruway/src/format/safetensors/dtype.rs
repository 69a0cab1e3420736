//! The element types of tensors.

use std::fmt;
use std::str::FromStr;

use crate::base::error::{Error, ErrorKind, Result, printable};

/// Declares the enum and its tables from one list, so that they cannot come apart.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $bits:literal),+ $(,)?) => {
        /// What one element of a tensor is.
        ///
        /// The order is the format's own: by alignment, smallest first. Writers put the tensors with the greatest
        /// alignment first, so that each one is aligned for its elements without padding between them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Dtype {
            $($(#[$doc])* $variant,)+
        }

        impl Dtype {
            /// Every type, in order.
            pub const ALL: [Self; [$($bits),+].len()] = [$(Self::$variant),+];

            /// The name as headers have it. Upper case only: `f32` is no dtype.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// The size of one element, in bits.
            pub const fn bits(self) -> u64 {
                match self {
                    $(Self::$variant => $bits,)+
                }
            }

            /// The type with this exact name, if there is one.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    /// A truth value in one byte: 0 or 1.
    Bool "BOOL" 8,
    /// 4-bit float (E2M1), two elements a byte.
    F4 "F4" 4,
    /// 6-bit float with 2 exponent and 3 mantissa bits, four elements in three bytes.
    F6E2M3 "F6_E2M3" 6,
    /// 6-bit float with 3 exponent and 2 mantissa bits, four elements in three bytes.
    F6E3M2 "F6_E3M2" 6,
    /// Unsigned 8-bit integer.
    U8 "U8" 8,
    /// Signed 8-bit integer.
    I8 "I8" 8,
    /// 8-bit float with 5 exponent and 2 mantissa bits.
    F8E5M2 "F8_E5M2" 8,
    /// 8-bit float with 4 exponent and 3 mantissa bits, finite values and NaN only.
    F8E4M3 "F8_E4M3" 8,
    /// 8-bit power of two: the scale of a block of small floats.
    F8E8M0 "F8_E8M0" 8,
    /// 8-bit float like `F8_E4M3`, without negative zero and with another exponent bias.
    F8E4M3Fnuz "F8_E4M3FNUZ" 8,
    /// 8-bit float like `F8_E5M2`, without negative zero and infinities and with another exponent bias.
    F8E5M2Fnuz "F8_E5M2FNUZ" 8,
    /// Signed 16-bit integer.
    I16 "I16" 16,
    /// Unsigned 16-bit integer.
    U16 "U16" 16,
    /// 16-bit IEEE 754 float.
    F16 "F16" 16,
    /// Brain float: the upper half of a 32-bit float.
    BF16 "BF16" 16,
    /// Signed 32-bit integer.
    I32 "I32" 32,
    /// Unsigned 32-bit integer.
    U32 "U32" 32,
    /// 32-bit IEEE 754 float.
    F32 "F32" 32,
    /// Complex number of two 32-bit floats, real part first.
    C64 "C64" 64,
    /// 64-bit IEEE 754 float.
    F64 "F64" 64,
    /// Signed 64-bit integer.
    I64 "I64" 64,
    /// Unsigned 64-bit integer.
    U64 "U64" 64,
}

/// Why a shape of a dtype has no size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SizeFault {
    /// The number of elements, or of bits, is beyond 64 bits.
    Overflow,
    /// The elements end in the middle of a byte: this many bits.
    PartByte(u64),
}

impl fmt::Display for SizeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overflow => f.write_str("the size of the shape overflows 64 bits"),
            Self::PartByte(bits) => write!(f, "the shape holds {bits} bits, which are not whole bytes"),
        }
    }
}

impl Dtype {
    /// The number of bytes that a tensor of this type and shape takes.
    ///
    /// Dimensions are multiplied in order and each step must fit 64 bits, so `[0, huge, 4]` is empty and
    /// `[huge, 4, 0]` is refused: the reference draws the line there too.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if the size overflows or is not a whole number of bytes.
    pub fn byte_count(self, shape: &[u64]) -> Result<u64> {
        self.size_of(shape).map_err(|fault| {
            Error::new(ErrorKind::InvalidInput, fault.to_string()).with("dtype", self).with("shape", shape_text(shape))
        })
    }

    /// As [`Dtype::byte_count`], with the fault alone: readers and writers blame different parties for it.
    pub(super) fn size_of(self, shape: &[u64]) -> Result<u64, SizeFault> {
        let elements = shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
        let bits = elements.and_then(|count| count.checked_mul(self.bits())).ok_or(SizeFault::Overflow)?;
        if bits.is_multiple_of(8) { Ok(bits / 8) } else { Err(SizeFault::PartByte(bits)) }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::from_name(name).ok_or_else(|| Error::new(ErrorKind::InvalidInput, format!("unknown dtype '{}'", printable(name))))
    }
}

/// A shape for messages: `[2, 3]`. Long shapes are cut, since a hostile header may hold millions of dimensions.
pub(super) fn shape_text(shape: &[u64]) -> String {
    const DIMS_MAX: usize = 16;
    let dims: Vec<String> = shape.iter().take(DIMS_MAX).map(u64::to_string).collect();
    let more = if shape.len() > DIMS_MAX { ", …" } else { "" };
    format!("[{}{more}]", dims.join(", "))
}
