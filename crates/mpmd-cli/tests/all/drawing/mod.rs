//! `mpmd draw` in a browser: opens pages, points at bars and zooms.

mod timelines;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use mpmd_schedule::timeline::{Bar, Mark, Timeline};
use serde_json::json;
use tempfile::TempDir;

use mpmd_browser::Chromium;
use timelines::{one_forward_one_backward, zero_bubble_v};

/// A common window size in pixels: width, height.
const WINDOW: [u32; 2] = [1280, 800];

/// The page of a timeline, drawn by `mpmd draw` into a temporary folder.
struct Drawn {
    folder: TempDir,
}

impl Drawn {
    fn new(timeline: &Timeline) -> Self {
        let drawn = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        fs::write(drawn.path("json"), serde_json::to_vec(timeline).unwrap()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
        command
            .arg("draw")
            .arg(drawn.path("json"))
            .arg("--output")
            .arg(drawn.path("html"));
        let output = command.output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        drawn
    }

    fn path(&self, extension: &str) -> PathBuf {
        self.folder.path().join(format!("timeline.{extension}"))
    }
}

/// Script that returns the elements of a page that overlap, leave the window or are cut; empty if
/// there are none. Only overlaps within a group are found.
const ASTRAY: &str = r##"(() => {
    const found = [];
    const groups = [
        "h1, #figures > div",
        "#legend li, #controls > *",
        "#corner, #ticks span, .head:not([hidden])",
        "#steps span",
        "#rows .name, #rows .idle, #rows .peak",
        "header, #tools, #overview, #axis, #scroll, #note",
    ];
    for (const group of groups) {
        const elements = [...document.querySelectorAll(group)];
        const boxes = elements.map((it) => [it, it.getBoundingClientRect()]);
        for (const [i, [it, a]] of boxes.entries()) {
            const name = (it.id || it.className || it.tagName) + " " + it.textContent.slice(0, 20);
            if (a.left < -0.5 || a.right > innerWidth + 0.5) found.push(name + " hangs out");
            const isCut = it.scrollWidth > it.clientWidth + 1 && it.id !== "scroll";
            if (isCut) found.push(name + " is cut");
            for (const [other, b] of boxes.slice(i + 1)) {
                const over = [
                    Math.min(a.right, b.right) - Math.max(a.left, b.left),
                    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top),
                ];
                if (over[0] > 0.6 && over[1] > 0.6) {
                    found.push(name + " lies over " + other.textContent.slice(0, 20));
                }
            }
        }
    }
    if (document.documentElement.scrollWidth > innerWidth) found.push("the page is too wide");
    return found.slice(0, 10).join("; ");
})()"##;

/// Returns (name for pictures, timeline) of timelines of 4 and of 64 ranks.
fn timelines() -> [(&'static str, Timeline); 4] {
    [
        ("1f1b-4", one_forward_one_backward(4, 8)),
        ("zbv-4", zero_bubble_v(4, 8)),
        ("1f1b-64", one_forward_one_backward(64, 128)),
        ("zbv-64", zero_bubble_v(64, 128)),
    ]
}

/// Returns the screen position (x, y) in pixels of the time `at`, in the middle of the bars of row
/// `row`.
fn place(browser: &mut Chromium, row: usize, at: f64) -> [f64; 2] {
    let place = format!(
        r##"(() => {{
            const chart = document.getElementById("chart").dataset;
            const name = document.querySelectorAll("#rows .name")[{row}].getBoundingClientRect();
            const idle = document.querySelectorAll("#rows .idle")[{row}].getBoundingClientRect();
            const left = name.right + 6, width = idle.left - left;
            const share = ({at} - chart.from) / (chart.until - chart.from);
            return [left + share * width, name.top + name.height / 2];
        }})()"##
    );
    let place = browser.value(&place);
    [0, 1].map(|i| place[i].as_f64().expect("a place"))
}

/// Returns the visible range of time (start, end), in the timeline's unit.
fn shown(browser: &mut Chromium) -> (f64, f64) {
    let shown = |browser: &mut Chromium, name| {
        browser.number(&format!("+document.getElementById('chart').dataset.{name}"))
    };
    (shown(browser, "from"), shown(browser, "until"))
}

/// Returns the screen position (x, y) in pixels of the middle of the element with this id.
fn middle(browser: &mut Chromium, id: &str) -> [f64; 2] {
    let box_of = format!(
        "(box => [box.x + box.width / 2, box.y + box.height / \
         2])(document.getElementById('{id}').getBoundingClientRect())"
    );
    let place = browser.value(&box_of);
    [0, 1].map(|i| place[i].as_f64().expect("a place"))
}

/// Returns the text of the tooltip; empty if it is hidden.
fn told(browser: &mut Chromium) -> String {
    browser.text(
        "(tip => tip.hidden ? '' : tip.innerText.replace(/\\s+/g, ' \
         '))(document.getElementById('tip'))",
    )
}

fn points_at(browser: &mut Chromium, at: [f64; 2]) -> String {
    browser.mouse("mouseMoved", at, json!({}));
    told(browser)
}

#[test]
fn pages_are_complete_in_light_and_dark_mode() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    for (name, timeline) in timelines() {
        let drawn = Drawn::new(&timeline);
        let mut grounds = Vec::new();
        for scheme in ["light", "dark"] {
            browser.open(&drawn.path("html"), WINDOW, scheme);
            assert_eq!(browser.complaints(), [""; 0], "{name}, {scheme}");
            browser.picture(&format!("{name}-{scheme}"));
            assert_eq!(browser.text(ASTRAY), "", "{name}, {scheme}");
            assert_eq!(
                browser.text("document.querySelector('h1').innerText"),
                timeline.title
            );
            // All ranks are visible without scrolling.
            let last = browser.number(
                "Math.max(...[...document.querySelectorAll('#rows \
                .name')].map(it => it.getBoundingClientRect().bottom))",
            );
            assert!(last <= f64::from(WINDOW[1]), "{name}: {last}");
            let rows = browser.number("document.querySelectorAll('#rows .name').length");
            assert_eq!(rows as usize, timeline.rows.len());
            let bars: usize = timeline.rows.iter().map(|row| row.bars.len()).sum();
            assert_eq!(
                browser.number("+document.getElementById('chart').dataset.drawn") as usize,
                bars
            );
            grounds.push(browser.text("getComputedStyle(document.body).backgroundColor"));
        }
        assert_eq!(grounds, ["rgb(255, 255, 255)", "rgb(15, 23, 32)"]);
    }
    // A small window, and one that changes its size.
    let drawn = Drawn::new(&one_forward_one_backward(4, 8));
    for window in [[640, 480], [1920, 1080], [380, 700]] {
        browser.open(&drawn.path("html"), window, "light");
        assert_eq!(
            (browser.complaints(), browser.text(ASTRAY)),
            (vec![], String::new()),
            "{window:?}"
        );
        browser.picture(&format!("1f1b-4-{}", window[0]));
    }
    browser.end();
}

#[test]
fn head_shows_the_figures_of_the_timeline() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let drawn = Drawn::new(&zero_bubble_v(4, 8));
    browser.open(&drawn.path("html"), WINDOW, "light");
    let figures =
        browser.text("document.getElementById('figures').innerText.replace(/\\s+/g, ' ')");
    assert_eq!(
        figures,
        "step time 53.6 units bubble 10.4 % of all their time ranks 4 8 stages, 8 microbatches \
         peak memory 8 activations on each"
    );
    let legend = browser.text("document.getElementById('legend').innerText.replace(/\\s+/g, ' ')");
    assert_eq!(
        legend,
        "forward input gradient weight gradient paler: a rank's later chunks bubble memory"
    );
    let ticks = browser.text("document.getElementById('ticks').innerText.replace(/\\s+/g, ' ')");
    assert!(
        ticks.contains("10 units") && ticks.contains("50 units"),
        "{ticks}"
    );
    browser.end();
}

#[test]
fn tooltip_describes_bar_gap_and_move() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let timeline = one_forward_one_backward(4, 8);
    let drawn = Drawn::new(&timeline);
    browser.open(&drawn.path("html"), WINDOW, "light");
    let bar = timeline.rows[2]
        .bars
        .iter()
        .find(|bar| bar.name == "2B3")
        .unwrap();
    let at = place(&mut browser, 2, (bar.start + bar.end) / 2.0);
    let text = points_at(&mut browser, at);
    browser.picture("1f1b-4-light-bar");
    let planned = bar.planned.unwrap();
    let ms = |time: f64| (time * 1e3 * 1e4).round() / 1e4;
    for part in [
        "Backward \u{b7} stage 2 \u{b7} microbatch 3".to_owned(),
        "on rank 2, process 2 name 2B3".to_owned(),
        format!("start {} ms", ms(bar.start))
            .chars()
            .take(10)
            .collect(),
        "length".to_owned(),
        format!("planned {}", ms(planned.0))
            .chars()
            .take(11)
            .collect(),
        " later".to_owned(),
        format!("waited for {}", bar.waited_for.as_ref().unwrap()),
        "issued".to_owned(),
        "400 \u{b5}s before it began".to_owned(),
        "MiB in use then".to_owned(),
        format!("operation #{}", bar.op.unwrap()),
        format!("line {}", bar.at.as_ref().unwrap()),
    ] {
        assert!(text.contains(&part), "{part:?} is not in {text:?}");
    }

    let gap = timeline.rows[0]
        .gaps
        .iter()
        .max_by(|a, b| (a.end - a.start).total_cmp(&(b.end - b.start)))
        .unwrap();
    let at = place(&mut browser, 0, (gap.start + gap.end) / 2.0);
    let text = points_at(&mut browser, at);
    browser.picture("1f1b-4-light-bubble");
    assert!(text.starts_with("Bubble \u{b7} rank 0 from "), "{text}");
    assert!(
        text.ends_with(&format!("waited for {}", gap.waits_for)),
        "{text}"
    );

    // Moves are below the bars once they are shown, with their destination.
    let [x, y] = middle(&mut browser, "show-moves");
    browser.click([x, y]);
    let height = "document.querySelectorAll('#rows .name')[1].getBoundingClientRect().bottom";
    let move_ = &timeline.rows[1].moves[0];
    let [x, _] = place(&mut browser, 1, (move_.start + move_.end) / 2.0);
    let below = browser.number(height) + 4.0;
    let text = points_at(&mut browser, [x, below]);
    browser.picture("1f1b-4-light-moves");
    let expected = "Move \u{b7} stage 1 \u{b7} microbatch 0 on rank 1, process 1 to rank 2";
    assert!(
        text.starts_with(expected) && text.contains("moves 4.0 MiB, 9.3 GiB/s"),
        "{text}"
    );

    // There is no tooltip beside the bars.
    assert_eq!(points_at(&mut browser, [5.0, 400.0]), "");
    assert_eq!(browser.complaints(), [""; 0]);
    browser.end();
}

#[test]
fn keys_select_neighbouring_bars() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let drawn = Drawn::new(&zero_bubble_v(4, 8));
    browser.open(&drawn.path("html"), WINDOW, "dark");
    browser.value("document.getElementById('scroll').focus()");
    let title = |browser: &mut Chromium| {
        told(browser)
            .split(" on ")
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let mut titles = Vec::new();
    for key in [
        "ArrowRight",
        "ArrowRight",
        "End",
        "Home",
        "ArrowDown",
        "ArrowUp",
        "ArrowLeft",
    ] {
        browser.key(key);
        titles.push(title(&mut browser));
    }
    let first = "Forward \u{b7} stage 0 \u{b7} microbatch 0";
    let expected = [
        first,
        "Forward \u{b7} stage 0 \u{b7} microbatch 1",
        "Weight gradient \u{b7} stage 0 \u{b7} microbatch 7",
        first,
        "Forward \u{b7} stage 1 \u{b7} microbatch 0",
        // The action of rank 0 in the middle of that bar.
        "Forward \u{b7} stage 0 \u{b7} microbatch 1",
        first,
    ];
    assert_eq!(titles, expected);
    browser.picture("zbv-4-dark-key");
    browser.key("Escape");
    assert_eq!(told(&mut browser), "");
    // Screen readers get the summary, and the rows in words.
    let summary = browser.text("document.getElementById('summary').textContent");
    assert!(
        summary.starts_with("step time 53.6 units; bubble 10.4 %"),
        "{summary}"
    );
    let row = browser.text("document.querySelectorAll('table tbody tr')[3].textContent");
    assert_eq!(
        row,
        "rank 310.4 %8 activations16 forward, 16 input gradient, 16 weight gradient"
    );
    browser.end();
}

/// Returns a timeline of three steps, one, two and one time as long as a 1F1B step. An evaluation
/// as long as the three together follows.
fn steps_and_an_evaluation() -> Timeline {
    let one = one_forward_one_backward(4, 8);
    let mut timeline = Timeline {
        marks: Vec::new(),
        ..one.clone()
    };
    timeline
        .rows
        .iter_mut()
        .for_each(|row| (row.bars.clear(), row.gaps.clear()).0);
    for (number, (from, times)) in [(0.0, 1.0), (1.0, 2.0), (3.0, 1.0)].into_iter().enumerate() {
        let moved = |time: f64| from * one.end + times * time;
        for (row, of_one) in timeline.rows.iter_mut().zip(&one.rows) {
            row.bars.extend(of_one.bars.iter().map(|bar| {
                Bar {
                    start: moved(bar.start),
                    end: moved(bar.end),
                    planned: bar
                        .planned
                        .map(|(start, end)| (from * one.end + start, from * one.end + end)),
                    ..bar.clone()
                }
            }));
        }
        let name = format!("step {}", number + 1);
        timeline.marks.push(Mark {
            at: moved(0.0),
            end: Some(moved(one.end)),
            name,
        });
    }
    let (start, end) = (4.0 * one.end, 8.0 * one.end);
    timeline.rows[0].bars.push(Bar {
        name: "Evaluate".to_owned(),
        start,
        end,
        ..Bar::default()
    });
    Timeline { end, ..timeline }
}

#[test]
fn page_opens_at_one_step_and_counts_no_evaluation() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let (one, timeline) = (one_forward_one_backward(4, 8), steps_and_an_evaluation());
    let drawn = Drawn::new(&timeline);
    browser.open(&drawn.path("html"), WINDOW, "light");
    assert_eq!(
        (browser.complaints(), browser.text(ASTRAY)),
        (vec![], String::new())
    );
    browser.picture("steps-light");
    assert_eq!(shown(&mut browser), (0.0, one.end));
    let names = "[...document.querySelectorAll('#steps span')].map(it => it.textContent).join()";
    let note = "document.getElementById('note').textContent";
    assert_eq!(browser.text(names), "step 1");
    assert!(browser.text(note).starts_with("This is one step"));
    let figures =
        browser.text("document.getElementById('figures').innerText.replace(/\\s+/g, ' ')");
    assert!(
        figures.starts_with("a step ") && figures.contains("median of 3: "),
        "{figures}"
    );
    assert!(
        figures.contains("of all their time in the steps"),
        "{figures}"
    );
    let reset = middle(&mut browser, "reset");
    browser.click(reset);
    assert_eq!(shown(&mut browser), (0.0, timeline.end));
    assert_eq!(browser.text(names), "step 1,step 2,step 3");
    assert!(!browser.text(note).contains("one step"));
    browser.picture("steps-light-all");
    browser.end();
}

#[test]
fn zoom_changes_the_scale_and_reset_restores_it() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let timeline = zero_bubble_v(64, 128);
    let drawn = Drawn::new(&timeline);
    browser.open(&drawn.path("html"), WINDOW, "light");
    let mode = "document.getElementById('chart').dataset.mode";
    let ticks = "document.getElementById('ticks').innerText";
    let (all, before) = (shown(&mut browser), browser.text(ticks));
    assert_eq!(
        (all, browser.text(mode)),
        ((0.0, timeline.end), "sums".to_owned())
    );

    // The wheel keeps the time under the pointer in place. Wheels turn at whole pixels.
    let [x, y] = place(&mut browser, 20, 400.0);
    let length = place(&mut browser, 20, 401.0)[0] - x;
    let (at, time) = ([x.floor(), y], 400.0 - x.fract() / length);
    for _ in 0..8 {
        browser.mouse("mouseWheel", at, json!({"deltaX": 0, "deltaY": -240}));
    }
    let (from, until) = shown(&mut browser);
    assert!(until - from < 100.0, "{from} {until}");
    let still = place(&mut browser, 20, time);
    assert!((still[0] - at[0]).abs() < 1.0, "{still:?} {at:?}");
    assert_ne!(browser.text(ticks), before);
    assert_eq!(browser.text(mode), "bars");
    browser.picture("zbv-64-light-zoomed");
    let bar = timeline.rows[20]
        .bars
        .iter()
        .find(|bar| bar.start > 400.0)
        .unwrap();
    let at = place(&mut browser, 20, (bar.start + bar.end) / 2.0);
    let text = points_at(&mut browser, at);
    browser.picture("zbv-64-light-bar");
    let (stage, microbatch) = (bar.stage.unwrap(), bar.microbatch.unwrap());
    assert!(
        text.contains(&format!(
            "stage {stage} \u{b7} microbatch {microbatch} on rank 20"
        )),
        "{text}"
    );

    // Dragging moves the visible range.
    let left = json!({"button": "left", "buttons": 1, "clickCount": 1});
    browser.mouse("mousePressed", [600.0, 400.0], left.clone());
    browser.mouse("mouseMoved", [700.0, 400.0], left.clone());
    browser.mouse("mouseReleased", [700.0, 400.0], left.clone());
    let dragged = shown(&mut browser);
    assert!(
        dragged.0 < from - 1.0 && (dragged.1 - dragged.0 - (until - from)).abs() < 1e-6,
        "{dragged:?}"
    );

    let reset = middle(&mut browser, "reset");
    browser.click(reset);
    assert_eq!(
        (shown(&mut browser), browser.text(ticks)),
        (all, before.clone())
    );

    // Zooms by button and by key.
    let button = middle(&mut browser, "in");
    browser.click(button);
    let (from, until) = shown(&mut browser);
    assert!(
        (until - from - 0.6 * timeline.end).abs() < 1e-6,
        "{from} {until}"
    );
    let button = middle(&mut browser, "out");
    browser.click(button);
    assert_eq!(shown(&mut browser), all);
    browser.value("document.getElementById('scroll').focus()");
    browser.key("+");
    assert_ne!(shown(&mut browser), all);
    browser.key("0");
    assert_eq!((shown(&mut browser), browser.text(ticks)), (all, before));

    // Zooms to a part selected in the overview.
    let overview =
        browser.number("document.getElementById('overview').getBoundingClientRect().y") + 15.0;
    let (begin, close) = (
        place(&mut browser, 0, 200.0)[0],
        place(&mut browser, 0, 300.0)[0],
    );
    browser.mouse("mousePressed", [begin, overview], left.clone());
    browser.mouse("mouseMoved", [close, overview], left.clone());
    browser.mouse("mouseReleased", [close, overview], left);
    let (from, until) = shown(&mut browser);
    assert!(
        (from - 200.0).abs() < 2.0 && (until - 300.0).abs() < 2.0,
        "{from} {until}"
    );
    assert_eq!(browser.complaints(), [""; 0]);
    browser.end();
}

#[test]
fn theme_can_be_chosen_and_pages_printed() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let drawn = Drawn::new(&one_forward_one_backward(4, 8));
    browser.open(&drawn.path("html"), WINDOW, "light");
    let ground = "getComputedStyle(document.body).backgroundColor";
    let choose = "(to => { const it = document.getElementById('theme'); it.value = to; \
        it.dispatchEvent(new Event('change')); })";
    for (to, expected) in [
        ("dark", "rgb(15, 23, 32)"),
        ("light", "rgb(255, 255, 255)"),
        ("auto", "rgb(255, 255, 255)"),
    ] {
        browser.value(&format!("{choose}('{to}')"));
        browser.settle();
        assert_eq!(browser.text(ground), expected, "{to}");
    }
    assert!(browser.paper("1f1b-4").starts_with(b"%PDF"));
    browser.call("Emulation.setEmulatedMedia", json!({"media": "print"}));
    let display = |id: &str| format!("getComputedStyle(document.getElementById('{id}')).display");
    assert_eq!(
        (
            browser.text(&display("chart")),
            browser.text(&display("controls"))
        ),
        ("flex".to_owned(), "none".to_owned())
    );
    // Only the paper has its size and light colours.
    let left = "document.body.style.width + (document.documentElement.dataset.theme || '')";
    assert_eq!(browser.text(left), "");
    assert_eq!(browser.complaints(), [""; 0]);
    browser.end();
}

#[test]
fn schedules_are_drawn() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("schedule.html");
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    let words = "schedule ZBVZeroBubble --ranks 4 --microbatches 8 --format html --output";
    let output = command.args(words.split(' ')).arg(&path).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    browser.open(&path, WINDOW, "light");
    browser.picture("schedule");
    let text = browser.text("document.querySelector('#figures').textContent");
    assert!(
        text.contains("51 units") && text.contains("5.9 %"),
        "{text}"
    );
    assert_eq!(browser.complaints(), [""; 0]);
    browser.end();
}

#[test]
fn invalid_timelines_are_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "{\"title\": 3}").unwrap();
    let ended = Command::new(env!("CARGO_BIN_EXE_mpmd"))
        .arg("draw")
        .arg(file.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        !ended.status.success() && said.contains("this is not a timeline as JSON"),
        "{said}"
    );
    let ended = Command::new(env!("CARGO_BIN_EXE_mpmd"))
        .args(["draw", "/no/such/file"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        !ended.status.success() && said.contains("cannot read /no/such/file"),
        "{said}"
    );
}
