//! The chat page in a browser.

use std::time::Duration;

use mpmd_browser::Chromium;
use mpmd_serve::{EngineFigures, StageFigures};

use crate::server::{Act, Server};

const WINDOWS: [[u32; 2]; 2] = [[1200, 800], [390, 780]];

/// JavaScript for the text of the conversation's last line.
const LAST: &str = "document.querySelector('#log li:last-child')?.textContent ?? ''";

fn page(server: &Server) -> String {
    format!("http://{}/", server.address)
}

/// Types and sends a message without a mouse: the page must have the focus on its input.
fn say(browser: &mut Chromium, text: &str) {
    browser.write(text);
    browser.key("Enter");
}

#[test]
fn page_chats_by_the_keyboard() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let server = Server::echo();
    let busy = |millis| StageFigures {
        busy: Duration::from_millis(millis),
        handed_bytes: 0,
        handed: Duration::ZERO,
    };
    let stages = vec![busy(500), busy(900)];
    server.report(EngineFigures {
        stages,
        in_flight: 3,
        blocks: 8,
        blocks_used: 2,
        ..Default::default()
    });
    for window in WINDOWS {
        for scheme in ["light", "dark"] {
            browser.visit(&page(&server), window, scheme);
            browser.until("document.getElementById('state').textContent === 'Ready'");
            assert_eq!(browser.text("document.title"), "toy");
            say(&mut browser, "Hi <b>you</b>");
            browser.until(&format!("({LAST}).includes('tokens per second')"));
            let said = browser.text(LAST);
            assert!(said.contains("<user>Hi <b>you</b><assistant>"), "{said}");
            // The conversation so far is asked about.
            say(&mut browser, "And");
            browser.until(&format!("({LAST}).includes('<user>And<assistant>')"));
            assert_eq!(
                browser.number("document.querySelectorAll('#log li').length"),
                4.0
            );
            browser.until("document.querySelectorAll('#stages li').length === 2");
            assert_eq!(
                browser.text("document.getElementById('flight').textContent"),
                "3"
            );
            assert_eq!(
                browser.text("document.getElementById('cache').textContent"),
                "25 %"
            );
            let wide = "document.documentElement.scrollWidth > window.innerWidth";
            assert_eq!(browser.value(wide), false, "{window:?}");
            browser.picture(&format!("chat-{scheme}-{}", window[0]));
            assert_eq!(browser.complaints(), [""; 0], "{scheme}, {window:?}");
        }
    }
    // The fields have names for screen readers.
    let unnamed = "[...document.querySelectorAll('input, textarea, button, meter')].filter(field \
                   => !(field.labels?.length || field.textContent.trim())).length";
    assert_eq!(browser.number(unnamed), 0.0);
    browser.end();
}

#[test]
fn page_stops_replies_and_tells_failures() {
    let Some(mut browser) = Chromium::start() else {
        return;
    };
    let server = Server::start(|request| match request.sampling.temperature == 1.0 {
        true => Act::Fail,
        false => Act::Stall(vec![40, 41]),
    });
    browser.visit(&page(&server), WINDOWS[0], "light");
    browser.until("document.getElementById('state').textContent === 'Ready'");
    say(&mut browser, "Hi");
    browser.until("!document.getElementById('stop').disabled");
    browser.until(&format!("({LAST}).length > 'Model'.length"));
    browser.key("Escape");
    browser.until(&format!("({LAST}).includes('Stopped.')"));
    browser.until("!document.getElementById('send').disabled");
    browser.value("document.getElementById('temperature').value = 1");
    say(&mut browser, "Once more");
    browser.until(&format!("({LAST}).includes('No reply: ')"));
    let again = browser.text("document.getElementById('text').value");
    assert_eq!(again, "Once more", "it can be sent again");
    browser.end();
}
