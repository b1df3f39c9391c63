//! Files that have the numbers of tokens in place of a text.

use std::path::Path;

use mpmd::Result;
use mpmd::train::tensors::read_regular;

use crate::error::unexpected;
use crate::hub::folder::Folder;
use crate::text::tokens::Tokens;

/// The first bytes of an array in the format of NumPy.
const NUMPY: &[u8] = b"\x93NUMPY";

/// The type of the numbers in a file of tokens. They are little-endian.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum TokenType {
    /// Numbers of two bytes, for vocabularies of up to 65,536 tokens.
    #[default]
    U16,
    /// Numbers of four bytes.
    U32,
}

impl TokenType {
    /// Returns the number of bytes of a token.
    fn size(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Returns the numbers that `bytes` has, one after another.
    fn read(self, bytes: &[u8]) -> Vec<u32> {
        match self {
            Self::U16 => {
                let pairs = bytes.as_chunks::<2>().0.iter();
                pairs.map(|pair| u16::from_le_bytes(*pair).into()).collect()
            }
            Self::U32 => {
                let fours = bytes.as_chunks::<4>().0.iter();
                fours.map(|four| u32::from_le_bytes(*four)).collect()
            }
        }
    }
}

impl Tokens {
    /// Reads a file of tokens: an array of NumPy (`.npy`) of one dimension and the dtype `uint16`
    /// or `uint32`, or numbers of the type `raw` without a header, as nanoGPT writes them.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, has another form or a part of a number, or has a token without a
    /// row in the embedding. The message names the file and the place.
    pub fn of_numbers(file: &Path, raw: TokenType, folder: &Folder) -> Result<Self> {
        let expected = "numbers of tokens";
        let bytes =
            read_regular(file, u64::MAX).map_err(|why| unexpected(file, "", expected, why))?;
        let (kind, values) = match bytes.strip_prefix(NUMPY) {
            Some(rest) => of_numpy(file, rest)?,
            None if file.extension().is_some_and(|end| end == "npy") => {
                let expected = "an array of NumPy, which begins with \"\\x93NUMPY\"";
                return Err(unexpected(file, "", expected, "another start"));
            }
            None => (raw, &bytes[..]),
        };
        let size = kind.size();
        if !values.len().is_multiple_of(size) {
            let expected = format!("{expected} of {size} bytes each");
            let found = format!("{} bytes", values.len());
            return Err(unexpected(file, "", expected, found));
        }

        let ids = kind.read(values);
        let rows = folder.config().vocab_size;
        match ids.iter().position(|id| *id as usize >= rows) {
            None => Ok(Self::of_ids(ids)),
            Some(place) => {
                let expected = format!("numbers below {rows}, the vocab_size of config.json");
                Err(unexpected(
                    file,
                    &format!("token {place}"),
                    expected,
                    ids[place],
                ))
            }
        }
    }
}

/// Returns the type of the numbers and their bytes in an array of NumPy. `rest` is the file without
/// its first bytes, [`NUMPY`].
fn of_numpy<'a>(file: &Path, rest: &'a [u8]) -> Result<(TokenType, &'a [u8])> {
    let expected = "an array of NumPy with one dimension";
    let cut = || unexpected(file, "", expected, "a damaged header");
    // Two bytes of the version, then the length of the header.
    let (header, values) = match rest {
        [1, _, a, b, rest @ ..] => rest.split_at_checked(u16::from_le_bytes([*a, *b]).into()),
        [2 | 3, _, a, b, c, d, rest @ ..] => {
            rest.split_at_checked(u32::from_le_bytes([*a, *b, *c, *d]) as usize)
        }
        _ => None,
    }
    .ok_or_else(cut)?;
    let header = std::str::from_utf8(header).map_err(|_| cut())?;

    let after = |key: &str| Some(header.split_once(key)?.1.trim_start());
    let kind = after("'descr':")
        .and_then(|text| text.split('\'').nth(1))
        .ok_or_else(cut)?;
    let kind = match kind {
        "<u2" => TokenType::U16,
        "<u4" => TokenType::U32,
        other => {
            let expected = "\"<u2\" or \"<u4\", little-endian uint16 or uint32";
            return Err(unexpected(file, "descr", expected, format!("{other:?}")));
        }
    };

    let shape = after("'shape':")
        .and_then(|text| text.strip_prefix('(')?.split(')').next())
        .ok_or_else(cut)?;
    let sizes = shape
        .split(',')
        .map(str::trim)
        .filter(|size| !size.is_empty());
    let sizes: Vec<usize> = sizes
        .map(|size| size.parse().map_err(|_| cut()))
        .collect::<Result<_>>()?;
    let bytes = |count: usize| count.checked_mul(kind.size());
    match sizes[..] {
        [count] if bytes(count) == Some(values.len()) => Ok((kind, values)),
        [_] => Err(unexpected(
            file,
            "",
            format!("the values of ({shape})"),
            format!("{} bytes", values.len()),
        )),
        _ => Err(unexpected(file, "shape", expected, format!("({shape})"))),
    }
}
