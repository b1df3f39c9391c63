//! Colours of bars. They differ in hue and in lightness, also for people with colour blindness.

use mpmd_schedule::timeline::Kind;

/// All kinds of bars. The index of a kind is its number on the page.
pub(super) const KINDS: [Kind; 6] = [
    Kind::Forward,
    Kind::Backward,
    Kind::BackwardInput,
    Kind::BackwardWeight,
    Kind::Other,
    Kind::Move,
];

/// Display names of the kinds, in the order of [`KINDS`].
pub(super) const NAMES: [&str; 6] = [
    "forward",
    "backward",
    "input gradient",
    "weight gradient",
    "other",
    "move",
];

/// A light or a dark colour scheme.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Theme {
    Light,
    Dark,
}

/// Light theme: for each of [`KINDS`], the colours of a rank's first and last chunk. From dark to
/// light: weight gradient, forward, backward, input gradient.
const LIGHT: [[&str; 2]; 6] = [
    ["#0c5fc1", "#3f86d8"],
    ["#eb7327", "#f0995b"],
    ["#f6c835", "#f7dd7d"],
    ["#650448", "#86225f"],
    ["#838a92", "#9aa1a8"],
    ["#0f766e", "#0f766e"],
];

/// Dark theme: for each of [`KINDS`], the colours of a rank's first and last chunk.
const DARK: [[&str; 2]; 6] = [
    ["#2f78d4", "#5798e3"],
    ["#f78740", "#f9ab72"],
    ["#fbd857", "#fdec9e"],
    ["#921965", "#ae377c"],
    ["#9a9fa5", "#b1b6bb"],
    ["#2dd4bf", "#2dd4bf"],
];

/// The two colours of text on bars: light and dark.
const INKS: [&str; 2] = ["#ffffff", "#10151b"];

/// Returns the number of a kind on the page: its index in [`KINDS`].
pub(super) fn number(kind: Kind) -> usize {
    KINDS.iter().position(|other| *other == kind).unwrap_or(4)
}

/// Returns the colour, as `#rrggbb`, of chunk number `chunk` of a rank with `chunks` chunks. A
/// fraction gives a colour between two chunks.
pub(super) fn shade(kind: Kind, theme: Theme, chunk: f64, chunks: usize) -> String {
    let [first, last] = match theme {
        Theme::Light => LIGHT[number(kind)],
        Theme::Dark => DARK[number(kind)],
    }
    .map(parts);
    let share = if chunks > 1 {
        (chunk / (chunks - 1) as f64).min(1.0)
    } else {
        0.0
    };
    let mixed = [0, 1, 2].map(|i| (first[i] + share * (last[i] - first[i])).round() as u8);
    format!("#{:02x}{:02x}{:02x}", mixed[0], mixed[1], mixed[2])
}

/// Returns the colour of text on the colour `on`, both as `#rrggbb`: the one with more contrast,
/// with a preference for white.
pub(super) fn ink(on: &str) -> &'static str {
    let contrast = |ink: &str| {
        let (a, b) = (luminance(ink) + 0.05, luminance(on) + 0.05);
        a.max(b) / a.min(b)
    };
    // White reads better on saturated colours than its computed contrast says.
    if 1.2 * contrast(INKS[0]) > contrast(INKS[1]) {
        INKS[0]
    } else {
        INKS[1]
    }
}

/// Returns (red, green, blue) of a colour `#rrggbb`, each from 0 to 255.
fn parts(colour: &str) -> [f64; 3] {
    let part = |at: usize| u8::from_str_radix(&colour[at..at + 2], 16).map_or(0.0, f64::from);
    [part(1), part(3), part(5)]
}

/// Returns (red, green, blue) of a colour `#rrggbb` as linear light, each from 0 to 1, by the
/// definition of sRGB.
fn linear(colour: &str) -> [f64; 3] {
    parts(colour).map(|part| {
        let part = part / 255.0;
        if part <= 0.040_45 {
            part / 12.92
        } else {
            ((part + 0.055) / 1.055).powf(2.4)
        }
    })
}

/// Returns the relative luminance of a colour `#rrggbb`, from 0 to 1, as defined by WCAG 2.
fn luminance(colour: &str) -> f64 {
    let [red, green, blue] = linear(colour);
    0.212_6 * red + 0.715_2 * green + 0.072_2 * blue
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulated colour vision, as (people, matrix on linear light): normal, and without red, green
    /// or blue cones (Machado, Oliveira and Fernandes 2009, full severity).
    const SEEN: [(&str, [[f64; 3]; 3]); 4] = [
        (
            "everybody",
            [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        ),
        (
            "protanopes",
            [
                [0.152286, 1.052583, -0.204868],
                [0.114503, 0.786281, 0.099216],
                [-0.003882, -0.048116, 1.051998],
            ],
        ),
        (
            "deuteranopes",
            [
                [0.367322, 0.860646, -0.227968],
                [0.280085, 0.672501, 0.047413],
                [-0.011820, 0.042940, 0.968881],
            ],
        ),
        (
            "tritanopes",
            [
                [1.255528, -0.076749, -0.178779],
                [-0.078411, 0.930809, 0.147602],
                [0.004733, 0.691367, 0.303900],
            ],
        ),
    ];

    /// Converts linear light to Björn Ottosson's Oklab, in which equal distances look about equal.
    fn oklab([red, green, blue]: [f64; 3]) -> [f64; 3] {
        let l = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue).cbrt();
        let m = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue).cbrt();
        let s = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue).cbrt();
        [
            0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
            1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
            0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s,
        ]
    }

    fn seen(colour: &str, by: &[[f64; 3]; 3]) -> [f64; 3] {
        let light = linear(colour);
        oklab(by.map(|row| {
            row.iter()
                .zip(light)
                .map(|(a, b)| a * b)
                .sum::<f64>()
                .clamp(0.0, 1.0)
        }))
    }

    #[test]
    fn passes_are_told_apart_by_everybody() {
        for theme in [Theme::Light, Theme::Dark] {
            let shades = |kind: Kind| [0.0, 1.0].map(|chunk| shade(kind, theme, chunk, 2));
            for (viewers, by) in &SEEN {
                for (i, a) in KINDS[..4].iter().enumerate() {
                    for b in &KINDS[i + 1..4] {
                        for (one, other) in shades(*a)
                            .iter()
                            .flat_map(|one| shades(*b).map(|b| (one.clone(), b)))
                        {
                            let (x, y) = (seen(&one, by), seen(&other, by));
                            let apart = x
                                .iter()
                                .zip(y)
                                .map(|(x, y)| (x - y).powi(2))
                                .sum::<f64>()
                                .sqrt();
                            assert!(
                                apart > 0.09,
                                "{theme:?}: {viewers} see {a:?} {one} as {b:?} {other}: {apart}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn passes_are_told_apart_by_lightness() {
        for theme in [Theme::Light, Theme::Dark] {
            let order = [
                Kind::BackwardWeight,
                Kind::Forward,
                Kind::Backward,
                Kind::BackwardInput,
            ];
            let lightness = |kind, chunk| oklab(linear(&shade(kind, theme, chunk, 2)))[0];
            for pair in order.windows(2) {
                let (darker, lighter) = (lightness(pair[0], 1.0), lightness(pair[1], 0.0));
                assert!(
                    lighter - darker > 0.04,
                    "{theme:?}: {pair:?} {darker} {lighter}"
                );
                let (darker, lighter) = (lightness(pair[0], 0.0), lightness(pair[1], 0.0));
                assert!(
                    lighter - darker > 0.1,
                    "{theme:?}: {pair:?} {darker} {lighter}"
                );
            }
        }
    }

    #[test]
    fn chunks_go_from_the_first_shade_to_the_last() {
        let shades = [0.0, 1.0, 2.0, 9.0].map(|chunk| shade(Kind::Forward, Theme::Light, chunk, 3));
        assert_eq!(
            (shades[0].as_str(), shades[2].as_str()),
            (LIGHT[0][0], LIGHT[0][1])
        );
        assert_eq!(shades[2], shades[3]);
        assert!(shades[1] != shades[0] && shades[1] != shades[2]);
        assert_eq!(shade(Kind::Move, Theme::Dark, 0.0, 1), DARK[5][0]);
    }

    #[test]
    fn writing_stands_out() {
        for colour in LIGHT.iter().chain(&DARK).flatten() {
            let (a, b) = (luminance(ink(colour)) + 0.05, luminance(colour) + 0.05);
            let contrast = a.max(b) / a.min(b);
            assert!(contrast > 3.0, "{} on {colour}: {contrast}", ink(colour));
        }
    }
}
