//! Placements of chunks: numbers, or texts as torch writes them.

use anyhow::{Context as _, bail};

use super::field::{Field, Malformed};

/// The kinds of devices that a placement in torch's form may name.
const DEVICES: [&str; 7] = ["cpu", "cuda", "hpu", "meta", "mps", "xla", "xpu"];

/// Reads the field `placements` of an object, a list. Returns each element with its number.
///
/// An element is a number, or a text: `rank:1/cuda:0` has the number 1, and `worker1/cuda:0` the
/// number of `worker1` in the object's field `names`. As in torch, a text may leave out the device.
pub(super) fn read_placements<'a>(
    object: &Field<'a>,
) -> Result<Vec<(Field<'a>, usize)>, Malformed> {
    let names = object.find("names")?;
    let names = match &names {
        None => Vec::new(),
        Some(names) => names.entries().ok_or_else(|| names.expected("an object"))?,
    };

    object.get("placements")?.list(|field| {
        let number = match field.as_text() {
            None => field.count(),
            Some(text) => match holder(text) {
                Err(fault) => Err(field.malformed(format!("{text:?} {fault}"))),
                Ok(PlacementHolder::Rank(rank)) => Ok(rank),
                Ok(PlacementHolder::Name(name)) => {
                    match names.iter().find(|(known, _)| *known == name) {
                        Some((_, number)) => number.count(),
                        None => Err(field.malformed(format!(
                            "{text:?} is on `{name}`, which has no number: add it to `names`"
                        ))),
                    }
                }
            },
        };
        Ok((field.clone(), number?))
    })
}

/// The process that a placement in torch's form names.
#[derive(Debug, Eq, PartialEq)]
enum PlacementHolder<'a> {
    Rank(usize),
    Name(&'a str),
}

/// Parses a placement as torch writes it: `rank:R` or `NAME`, and optionally a slash and a device.
/// The message of an error continues a sentence that begins with `text`.
fn holder(text: &str) -> anyhow::Result<PlacementHolder<'_>> {
    let (process, device) = match text.split_once('/') {
        Some((process, device)) => (process, Some(device)),
        None => (text, None),
    };

    if let Some(device) = device.filter(|device| !is_device(device)) {
        bail!(
            "has {device:?} for a device, which is none of {}",
            DEVICES.join(", ")
        );
    }
    if device.is_none() && is_device(process) {
        bail!("names no process: write rank:R/{process}");
    }

    match process.split_once(':') {
        Some(("rank", rank)) if is_number(rank) => rank
            .parse()
            .map(PlacementHolder::Rank)
            .context("has too large a rank"),
        None if !process.is_empty() => Ok(PlacementHolder::Name(process)),
        _ => bail!("is no placement: expected rank:R/DEVICE or NAME/DEVICE"),
    }
}

/// True for a kind of devices, with or without an index: `cuda:0`.
fn is_device(text: &str) -> bool {
    match text.split_once(':') {
        Some((kind, index)) => DEVICES.contains(&kind) && is_number(index),
        None => DEVICES.contains(&text),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_are_read_as_torch_writes_them() {
        for (text, expected) in [
            ("rank:1/cuda:0", PlacementHolder::Rank(1)),
            ("rank:12/cpu", PlacementHolder::Rank(12)),
            ("rank:3", PlacementHolder::Rank(3)),
            ("worker1/cuda:1", PlacementHolder::Name("worker1")),
            ("trainer", PlacementHolder::Name("trainer")),
        ] {
            assert_eq!(holder(text).unwrap(), expected, "{text}");
        }
        for (text, problem) in [
            ("cuda:0", "names no process: write rank:R/cuda:0"),
            ("cpu", "names no process: write rank:R/cpu"),
            ("rank:x/cuda:0", "is no placement"),
            ("rank:-1", "is no placement"),
            ("group:1/cpu", "is no placement"),
            ("/cpu", "is no placement"),
            ("", "is no placement"),
            ("rank:99999999999999999999/cpu", "too large a rank"),
            ("rank:1/gpu:0", "has \"gpu:0\" for a device"),
            ("rank:1/cuda:0/x", "has \"cuda:0/x\" for a device"),
            ("rank:1/cuda:", "for a device"),
        ] {
            let said = holder(text).unwrap_err().to_string();
            assert!(said.contains(problem), "{text}: {said}");
        }
    }
}
