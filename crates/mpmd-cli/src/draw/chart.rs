//! The picture of losses, as SVG.

use std::fmt::Write as _;

use mpmd_launch::printable;

use super::axis::{Axis, AxisScale};
use super::loss_history::{LossHistory, LossPoint};
use crate::schedule::round;

/// Colours of the files' curves, which people with any colour vision tell apart.
pub(super) const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#333333",
];

/// Size of the picture and place of the plot in it, in pixels.
const WIDTH: f64 = 900.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 24.0;
const PLOT_HEIGHT: f64 = 380.0;
/// Space above the plot, without and with a title.
const TOP: f64 = 18.0;
const TOP_WITH_TITLE: f64 = 46.0;
/// Space below the plot for numbers and the name of the axis.
const BELOW: f64 = 52.0;
/// Height of a line of the legend.
const LEGEND_LINE: f64 = 20.0;

/// Approximate number of round numbers on an axis.
const TICKS: usize = 6;

/// Maximum number of points of a curve that are marked by dots.
const MOST_DOTS: usize = 60;

/// Maximum number of characters of a file's name in the legend.
const MOST_OF_NAME: usize = 76;

const STYLE: &str = ".grid{stroke:#d9dfe6}.axis{stroke:#5c6875}.name{fill:#5c6875}\
                     .title{font-size:17px;font-weight:650}.curve{fill:none;\
                     stroke-linejoin:round;stroke-linecap:round}.training{stroke-width:1.2;\
                     stroke-opacity:.6}.held-out{stroke-width:2.2}";

/// The picture of losses over steps.
pub(super) struct LossChart {
    histories: Vec<LossHistory>,
    title: Option<String>,
    steps: Axis,
    losses: Axis,
}

/// A curve of the picture: the training or held-out losses of a file.
struct Curve<'a> {
    points: &'a [LossPoint],
    colour: &'static str,
    /// The class of the curve in the style.
    class: &'static str,
    legend: String,
    has_dots: bool,
}

impl LossChart {
    /// Creates the picture of trainings, of which at least one has a loss.
    pub(super) fn new(
        histories: Vec<LossHistory>,
        scale: AxisScale,
        title: Option<String>,
    ) -> Self {
        let all = || {
            let points = |history: &'_ LossHistory| {
                [history.training.clone(), history.held_out.clone()].concat()
            };
            histories.iter().flat_map(points)
        };
        let steps = all().map(|point| point.step);
        let first = steps.clone().min().unwrap_or(0);
        let last = steps.max().unwrap_or(0);
        let low = all().map(|point| point.loss).fold(f64::INFINITY, f64::min);
        let high = all()
            .map(|point| point.loss)
            .fold(f64::NEG_INFINITY, f64::max);
        Self {
            steps: Axis::of_steps(first, last, TICKS),
            losses: Axis::around(scale, low, high, TICKS),
            histories,
            title,
        }
    }

    /// Returns the picture as an SVG document. The same losses give the same text.
    pub(super) fn to_svg(&self) -> String {
        let top = match self.title {
            Some(_) => TOP_WITH_TITLE,
            None => TOP,
        };
        let curves: Vec<Curve<'_>> = self.curves();
        let bottom = top + PLOT_HEIGHT;
        let height = bottom + BELOW + LEGEND_LINE * curves.len() as f64 + 8.0;
        let names: Vec<String> = self
            .histories
            .iter()
            .map(|history| escaped(&history.name))
            .collect();
        let label = match &self.title {
            Some(title) => escaped(title),
            None => format!("Losses over steps of {}", names.join(", ")),
        };

        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             role=\"img\" aria-label=\"{label}\" font-family=\"ui-sans-serif, system-ui, \
             'Segoe UI', Roboto, 'DejaVu Sans', sans-serif\" font-size=\"12\" fill=\"#1f2933\">\n\
             <title>{label}</title>\n<style>{STYLE}</style>\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
        );
        if let Some(title) = &self.title {
            let _ = writeln!(
                svg,
                "<text class=\"title\" x=\"{LEFT}\" y=\"28\">{}</text>",
                escaped(title)
            );
        }

        self.add_axes(&mut svg, top, bottom);
        for curve in &curves {
            self.add_curve(&mut svg, curve, bottom);
        }
        for (at, curve) in curves.iter().enumerate() {
            add_legend(&mut svg, curve, bottom + BELOW + LEGEND_LINE * at as f64);
        }
        svg + "</svg>\n"
    }

    /// Returns the curves in the order of the legend.
    fn curves(&self) -> Vec<Curve<'_>> {
        let mut curves = Vec::new();
        for (history, colour) in self.histories.iter().zip(COLOURS) {
            let name = shortened(&history.name);
            if let Some(LossPoint { step, loss }) = history.training.last() {
                curves.push(Curve {
                    points: &history.training,
                    colour,
                    class: "training",
                    legend: format!("{name}: training, last {} at step {step}", round(*loss)),
                    has_dots: false,
                });
            }

            let lowest = history
                .held_out
                .iter()
                .min_by(|a, b| a.loss.total_cmp(&b.loss));
            if let Some(LossPoint { step, loss }) = lowest {
                curves.push(Curve {
                    points: &history.held_out,
                    colour,
                    class: "held-out",
                    legend: format!("{name}: held-out, lowest {} at step {step}", round(*loss)),
                    has_dots: history.held_out.len() <= MOST_DOTS,
                });
            }
        }
        curves
    }

    /// Adds the grid, the numbers and the names of both axes.
    fn add_axes(&self, svg: &mut String, top: f64, bottom: f64) {
        for tick in &self.losses.ticks {
            let y = self.y(tick.value, bottom);
            let label = &tick.label;
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 8.0,
                y + 4.0
            );
        }
        for tick in &self.steps.ticks {
            let x = self.x(tick.value);
            let label = &tick.label;
            let _ = writeln!(
                svg,
                "<path class=\"axis\" d=\"M{x:.1} {bottom:.1}v5\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
                bottom + 19.0
            );
        }

        let middle = (LEFT + RIGHT) / 2.0;
        let half = (top + bottom) / 2.0;
        let _ = writeln!(
            svg,
            "<path class=\"axis\" d=\"M{LEFT} {bottom:.1}H{RIGHT}\"/>\n\
             <text class=\"name\" x=\"{middle:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">step</text>\n\
             <text class=\"name\" transform=\"translate(18 {half:.1}) rotate(-90)\" \
             text-anchor=\"middle\">loss</text>",
            bottom + 36.0
        );
    }

    fn add_curve(&self, svg: &mut String, curve: &Curve<'_>, bottom: f64) {
        let place = |point: &LossPoint| (self.x(point.step as f64), self.y(point.loss, bottom));
        let places = thinned(curve.points.iter().map(place));
        let Curve { colour, class, .. } = curve;

        let _ = write!(
            svg,
            "<path class=\"curve {class}\" stroke=\"{colour}\" d=\""
        );
        for (at, (x, y)) in places.iter().enumerate() {
            let command = if at == 0 { 'M' } else { 'L' };
            let _ = write!(svg, "{command}{x:.1} {y:.1}");
        }
        // A curve of one point is a dot.
        let end = if places.len() == 1 { "h0" } else { "" };
        let _ = writeln!(svg, "{end}\"/>");

        if curve.has_dots {
            for (x, y) in &places {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.8\" fill=\"{colour}\"/>"
                );
            }
        }
    }

    fn x(&self, step: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * self.steps.position(step)
    }

    fn y(&self, loss: f64, bottom: f64) -> f64 {
        bottom - PLOT_HEIGHT * self.losses.position(loss)
    }
}

/// Adds a line of the legend: a piece of the curve, and its name.
fn add_legend(svg: &mut String, curve: &Curve<'_>, y: f64) {
    let Curve {
        colour,
        class,
        legend,
        ..
    } = curve;
    let end = LEFT + 30.0;
    let _ = write!(
        svg,
        "<path class=\"curve {class}\" stroke=\"{colour}\" d=\"M{LEFT} {y:.1}H{end}\"/>"
    );
    if curve.has_dots {
        let x = LEFT + 15.0;
        let _ = write!(
            svg,
            "<circle cx=\"{x}\" cy=\"{y:.1}\" r=\"2.8\" fill=\"{colour}\"/>"
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{:.1}\">{}</text>",
        end + 10.0,
        y + 4.0,
        escaped(legend)
    );
}

/// Keeps at most four points of each column of pixels: the first, the lowest, the highest and the
/// last. The curve looks the same, and a long training gives no large file.
fn thinned(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let points: Vec<(f64, f64)> = points.collect();
    let mut kept = Vec::new();
    for column in points.chunk_by(|a, b| a.0 as i64 == b.0 as i64) {
        let by_height = |at: &usize, other: &usize| column[*at].1.total_cmp(&column[*other].1);
        let indices = || 0..column.len();
        let mut places = [
            0,
            indices().min_by(by_height).unwrap_or(0),
            indices().max_by(by_height).unwrap_or(0),
            column.len() - 1,
        ];
        places.sort_unstable();
        let mut before = None;
        for place in places {
            if before.replace(place) != Some(place) {
                kept.push(column[place]);
            }
        }
    }
    kept
}

/// Returns the end of a long file name.
fn shortened(name: &str) -> String {
    let count = name.chars().count();
    if count <= MOST_OF_NAME {
        return name.to_owned();
    }
    let end: String = name.chars().skip(count + 1 - MOST_OF_NAME).collect();
    format!("…{end}")
}

/// Returns a text as XML shows it, with control characters escaped.
fn escaped(text: &str) -> String {
    printable(text)
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a training with these losses at the steps 1, 2, … and an evaluation at the last.
    fn history(name: &str, losses: &[f64]) -> LossHistory {
        let point = |(loss, step): (&f64, u64)| LossPoint { step, loss: *loss };
        let training: Vec<LossPoint> = losses.iter().zip(1..).map(point).collect();
        LossHistory {
            name: name.to_owned(),
            held_out: training[training.len() - 1..].to_vec(),
            training,
            skipped: Vec::new(),
        }
    }

    fn svg(histories: Vec<LossHistory>, scale: AxisScale) -> String {
        LossChart::new(histories, scale, None).to_svg()
    }

    #[test]
    fn curves_have_the_places_of_their_losses() {
        let text = svg(vec![history("a", &[4.0, 2.0, 1.0, 0.0])], AxisScale::Linear);
        // Steps 0 to 4 from 70 to 876, losses 0 to 4 from 398 up to 18.
        let training = "<path class=\"curve training\" stroke=\"#0072b2\" \
                        d=\"M271.5 18.0L473.0 208.0L674.5 303.0L876.0 398.0\"/>";
        assert!(text.contains(training), "{text}");
        assert!(text.contains("<circle cx=\"876.0\" cy=\"398.0\""), "{text}");
        assert!(
            text.contains(">a: held-out, lowest 0 at step 4</text>"),
            "{text}"
        );
        for number in ["0", "1", "2", "3", "4"] {
            assert!(text.contains(&format!(">{number}</text>")), "{text}");
        }
    }

    #[test]
    fn equal_losses_give_equal_pictures() {
        let histories = || vec![history("a", &[2.0, 1.5]), history("b", &[3.0, 0.125])];
        let text = svg(histories(), AxisScale::Linear);
        assert_eq!(text, svg(histories(), AxisScale::Linear));
        assert!(text.contains(COLOURS[0]) && text.contains(COLOURS[1]));
        assert_ne!(text, svg(histories(), AxisScale::Logarithmic));
        // Equal ratios are equal distances.
        let logarithmic = svg(
            vec![history("a", &[0.1, 1.0, 10.0])],
            AxisScale::Logarithmic,
        );
        assert!(
            logarithmic.contains("M338.7 398.0L607.3 208.0L876.0 18.0"),
            "{logarithmic}"
        );
    }

    #[test]
    fn names_cannot_break_the_picture() {
        let name = "<a href=\"x\">&\u{1b}";
        let text = svg(vec![history(name, &[1.0])], AxisScale::Linear);
        assert!(!text.contains("<a href"), "{text}");
        let shown = "&lt;a href=&quot;x&quot;&gt;&amp;\\u001b: training, last 1 at step 1";
        assert!(text.contains(shown), "{text}");

        let long = svg(vec![history(&"x".repeat(500), &[1.0])], AxisScale::Linear);
        let short = format!(">…{}: training", "x".repeat(MOST_OF_NAME - 1));
        assert!(long.contains(&short), "{long}");
    }

    #[test]
    fn long_training_keeps_its_extremes() {
        let column = [(1.0, 5.0), (1.1, 9.0), (1.2, 6.0), (1.3, 2.0), (1.4, 4.0)];
        let points = column.into_iter().chain([(2.0, 1.0)]);
        let expected = [(1.0, 5.0), (1.1, 9.0), (1.3, 2.0), (1.4, 4.0), (2.0, 1.0)];
        assert_eq!(thinned(points), expected);

        let mut losses = vec![1.0; 200_000];
        losses[123_456] = 7.0;
        let text = svg(vec![history("a", &losses)], AxisScale::Linear);
        assert!(text.len() < 100_000, "{} bytes", text.len());
        assert!(text.contains("L567.5 18.0"), "the outlier is kept");
    }
}
