//! Sources of tokens: a text, or a file of token numbers.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mpmd_core::{Error, Program, Result, open_regular};
use mpmd_layout::random::Key;

use super::Text;
use crate::tensors::refuse_pointer;

/// A long sequence of tokens from which [`Windows`](super::Windows) cut theirs.
pub trait TokenSource: fmt::Debug + Send + Sync + 'static {
    /// Returns the number of tokens. It is the same on every process.
    fn tokens(&self) -> usize;

    /// Reads the tokens from index `start` on.
    ///
    /// # Errors
    ///
    /// If there are fewer, or they cannot be read.
    fn read(&self, start: usize, tokens: &mut [u32]) -> Result<()>;

    /// Makes the processes compare their tokens.
    ///
    /// # Errors
    ///
    /// If the tokens cannot be read, or the call is within a captured step.
    fn compare(&self, p: &mut Program) -> Result<()>;
}

/// Each byte is a token.
impl TokenSource for Text {
    fn tokens(&self) -> usize {
        self.bytes().len()
    }

    fn read(&self, start: usize, tokens: &mut [u32]) -> Result<()> {
        let bytes = self.bytes().get(start..start + tokens.len());
        let bytes =
            bytes.ok_or_else(|| Error::kernel(format!("byte {start} is the text's end")))?;
        tokens.iter_mut().zip(bytes).for_each(|(token, byte)| *token = u32::from(*byte));
        Ok(())
    }

    fn compare(&self, p: &mut Program) -> Result<()> {
        Text::compare(self, p)
    }
}

/// Number of places at which the processes compare a file.
const COMPARED: usize = 256;

/// A file of token numbers, little-endian. It stays on disk: a device reads the windows that it
/// needs. Clones share the open file.
#[derive(Clone, Debug)]
pub struct TokenFile {
    file: Arc<File>,
    path: PathBuf,
    /// Bytes of a token: 2 or 4.
    width: usize,
    tokens: usize,
}

impl TokenFile {
    /// Opens a file of 16-bit numbers.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, or its size is odd.
    pub fn of_u16(path: impl AsRef<Path>) -> Result<Self> {
        Self::open(path.as_ref(), 2)
    }

    /// Opens a file of 32-bit numbers.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, or its size is not a multiple of four bytes.
    pub fn of_u32(path: impl AsRef<Path>) -> Result<Self> {
        Self::open(path.as_ref(), 4)
    }

    fn open(path: &Path, width: usize) -> Result<Self> {
        let unreadable = |error| unreadable(path, &error);
        let file = open_regular(path).map_err(unreadable)?;
        let bytes = file.metadata().map_err(unreadable)?.len();
        refuse_pointer(path, bytes).map_err(unreadable)?;
        let bytes = bytes as usize;
        if !bytes.is_multiple_of(width) {
            return Err(Error::Environment(format!(
                "{} has {bytes} bytes, which are no tokens of {width} bytes each",
                path.display()
            )));
        }
        Ok(Self { file: Arc::new(file), path: path.to_owned(), width, tokens: bytes / width })
    }
}

impl TokenSource for TokenFile {
    fn tokens(&self) -> usize {
        self.tokens
    }

    fn read(&self, start: usize, tokens: &mut [u32]) -> Result<()> {
        let mut bytes = vec![0; tokens.len() * self.width];
        let read = self.file.read_exact_at(&mut bytes, (start * self.width) as u64);
        read.map_err(|error| unreadable(&self.path, &error))?;
        for (token, bytes) in tokens.iter_mut().zip(bytes.chunks_exact(self.width)) {
            let mut number = [0; 4];
            number[..bytes.len()].copy_from_slice(bytes);
            *token = u32::from_le_bytes(number);
        }
        Ok(())
    }

    /// Makes the processes compare the number of tokens, and tokens at 256 places.
    fn compare(&self, p: &mut Program) -> Result<()> {
        let mut key = Key(self.tokens as u64);
        let mut token = [0];
        for start in (0..self.tokens).step_by(self.tokens.div_ceil(COMPARED).max(1)) {
            self.read(start, &mut token)?;
            key = key.fold_in(u64::from(token[0]));
        }
        p.assert_same(format!("a file of {} tokens, with hash {:016x}", self.tokens, key.0))
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::Environment(format!("cannot read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn files_have_the_tokens_that_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let numbers = [1u32, 50_000, 3, 65_535, 5];
        let read = |file: Result<TokenFile>| {
            let file = file.unwrap();
            let mut tokens = [0; 3];
            file.read(1, &mut tokens).unwrap();
            assert!(file.read(3, &mut tokens).unwrap_err().to_string().contains("tokens"));
            (file.tokens(), tokens)
        };
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| (*n as u16).to_le_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(read(TokenFile::of_u16(&path)), (5, [50_000, 3, 65_535]));
        assert!(TokenFile::of_u32(&path).unwrap_err().to_string().contains("10 bytes"));
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| (n << 8).to_le_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(read(TokenFile::of_u32(&path)).1[0], 50_000 << 8);
        assert!(TokenFile::of_u16(folder.path().join("absent")).is_err());
        std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\nsize 9\n").unwrap();
        let said = TokenFile::of_u16(&path).unwrap_err().to_string();
        assert!(said.contains("a pointer of Git LFS in place of the file"), "{said}");
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for path in [&pipe, Path::new("/dev/zero")] {
            let said = TokenFile::of_u16(path).unwrap_err().to_string();
            assert!(said.ends_with("no regular file"), "{said}");
        }
    }
}
