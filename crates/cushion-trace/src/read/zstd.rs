//! Unpacks Zstandard frame by frame, checks their checksums, and limits the window size.

use std::error::Error;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The window of `zstd --ultra -22` and `zstd --long`. A hostile frame can ask for terabytes.
const MAX_WINDOW: u64 = 128 << 20;

/// Reads the unpacked bytes of a Zstandard input.
pub(crate) struct Unpacker<R> {
    packed: BufReader<R>,
    decoder: FrameDecoder,
    /// Whether a frame is being unpacked.
    in_frame: bool,
}

impl<R: Read> Unpacker<R> {
    pub(crate) fn new(packed: R, memory_limit: u64) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_WINDOW.min(memory_limit));
        Self { packed: BufReader::with_capacity(64 << 10, packed), decoder, in_frame: false }
    }

    /// Begins the next frame; `false` at the end of the file.
    fn begin(&mut self) -> io::Result<bool> {
        if self.packed.fill_buf()?.is_empty() {
            return Ok(false);
        }
        match self.decoder.reset(&mut self.packed) {
            Ok(()) => self.in_frame = true,
            // A skippable frame.
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let skipped =
                    io::copy(&mut self.packed.by_ref().take(length.into()), &mut io::sink())?;
                if skipped < length.into() {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
            }
            Err(FrameDecoderError::WindowSizeTooBig { requested, max }) => {
                return Err(io::Error::other(format!(
                    "its window is {requested} bytes, more than the {max} allowed"
                )));
            }
            Err(error) => return Err(cause(error)),
        }
        Ok(true)
    }

    fn end(&mut self) -> io::Result<()> {
        self.in_frame = false;
        let written = self.decoder.get_checksum_from_data();
        let found = self.decoder.get_calculated_checksum();
        match (written, found) {
            (Some(written), Some(found)) if written != found => {
                Err(io::Error::other("the checksum is not that of the data"))
            }
            _ => Ok(()),
        }
    }
}

impl<R: Read> Read for Unpacker<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.in_frame && !self.begin()? {
                return Ok(0);
            }
            if !self.in_frame {
                continue;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.packed, one).map_err(cause)?;
            }
            let got = self.decoder.read(buffer)?;
            if got > 0 || buffer.is_empty() {
                return Ok(got);
            }
            self.end()?;
        }
    }
}

/// Returns the input's I/O error if it is the cause; otherwise the decoder's error.
fn cause(error: FrameDecoderError) -> io::Error {
    let mut next: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(reason) = next {
        if let Some(io) = reason.downcast_ref::<io::Error>() {
            return match io.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::new(io.kind(), io.to_string()),
            };
        }
        next = reason.source();
    }
    io::Error::other(error)
}
