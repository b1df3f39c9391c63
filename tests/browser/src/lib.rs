//! A headless browser for tests of pages, controlled over two pipes.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Time limit of an answer of the browser, also on a busy machine; after it, the test panics.
const LONG: Duration = Duration::from_secs(90);

/// Names of programs that may be the browser, in the order in which they are tried.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// A browser with one page, driven through pipes. Dropping it ends all its processes and removes
/// its files.
pub struct Chromium {
    child: Child,
    ask: Option<ChildStdin>,
    said: Receiver<Value>,
    /// Events received before or between answers, since the page was opened.
    events: VecDeque<Value>,
    session: String,
    /// The beginning of the address of the page's server; empty for a file.
    origin: String,
    next: u64,
    profile: TempDir,
}

impl Chromium {
    /// Starts a browser with an empty page. If none is installed, prints that and returns `None`.
    pub fn start() -> Option<Self> {
        let answers = |name: &&&str| {
            let output = Command::new(name)
                .arg("--version")
                .stdin(Stdio::null())
                .stderr(Stdio::null())
                .output();
            output.is_ok_and(|output| output.status.success())
        };
        let Some(name) = NAMES.iter().find(answers) else {
            println!("skipped: Chromium is not installed");
            return None;
        };
        let profile = tempfile::Builder::new()
            .prefix("mpmd-chromium-")
            .tempdir()
            .unwrap();
        // The browser reads descriptor 3 and writes descriptor 4. The shell sets up these pipes and
        // then executes the browser.
        let mut command = Command::new("sh");
        command.args([
            "-c",
            r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null"#,
            "sh",
            name,
        ]);
        command.args([
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--no-default-browser-check",
        ]);
        command.args([
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-extensions",
        ]);
        command.args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]);
        command.args([
            "--disable-breakpad",
            "--force-color-profile=srgb",
            "--mute-audio",
            "--no-proxy-server",
        ]);
        command
            .arg(format!(
                "--user-data-dir={}",
                profile.path().join("profile").display()
            ))
            .arg("about:blank");
        // All files of the browser go into this folder.
        command
            .env("HOME", profile.path())
            .env("XDG_CONFIG_HOME", profile.path());
        command
            .env("XDG_CACHE_HOME", profile.path())
            .env("TMPDIR", profile.path());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0);
        let mut child = command.spawn().expect("a shell");
        let (ask, out) = (child.stdin.take(), child.stdout.take().expect("piped"));
        let (sender, said) = channel();
        thread::spawn(move || {
            for message in BufReader::new(out).split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else {
                    break;
                };
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let (events, session, origin) = (VecDeque::new(), String::new(), String::new());
        let mut this = Self {
            child,
            ask,
            said,
            events,
            session,
            origin,
            next: 0,
            profile,
        };
        let target = this.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = this.call("Target.attachToTarget", attach);
        this.session = attached["sessionId"]
            .as_str()
            .expect("a session")
            .to_owned();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            this.call(&format!("{domain}.enable"), json!({}));
        }
        Some(this)
    }

    /// Calls a method of the DevTools protocol, and blocks until its result arrives. Panics for an
    /// error or after the time limit.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        let mut line = message.to_string().into_bytes();
        line.push(0);
        self.ask
            .as_mut()
            .expect("still running")
            .write_all(&line)
            .expect("the browser has ended");
        let until = Instant::now() + LONG;
        loop {
            let mut message = self.receive(until, method);
            if message["id"] == self.next {
                assert!(
                    message.get("error").is_none(),
                    "{method}: {}",
                    message["error"]
                );
                return message["result"].take();
            }
            self.events.push_back(message);
        }
    }

    fn receive(&self, until: Instant, awaited: &str) -> Value {
        let left = until.saturating_duration_since(Instant::now());
        self.said
            .recv_timeout(left)
            .unwrap_or_else(|error| panic!("{awaited}: {error} within {LONG:?}"))
    }

    /// Opens a file as [`visit`](Self::visit) does.
    pub fn open(&mut self, path: &Path, window: [u32; 2], scheme: &str) {
        self.go(&format!("file://{}", path.display()), window, scheme);
        self.origin.clear();
    }

    /// Opens the page of a server, `http://HOST:PORT/`, at this window size (width, height) in
    /// pixels and colour scheme (`light` or `dark`). Blocks until the page is loaded and drawn.
    pub fn visit(&mut self, address: &str, window: [u32; 2], scheme: &str) {
        self.go(address, window, scheme);
        self.origin = address.to_owned();
    }

    fn go(&mut self, address: &str, [width, height]: [u32; 2], scheme: &str) {
        let screen =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", screen);
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", media);
        self.events.clear();
        let answer = self.call("Page.navigate", json!({"url": address}));
        assert!(answer.get("errorText").is_none(), "{answer}");
        self.event("Page.loadEventFired");
        self.settle();
    }

    /// Writes a text where the focus is. Waits until changes are drawn.
    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
        self.settle();
    }

    /// Blocks until an expression is true. Panics after the time limit.
    pub fn until(&mut self, expression: &str) {
        let until = Instant::now() + LONG;
        while self.value(expression) != true {
            assert!(
                Instant::now() < until,
                "{expression} is never true within {LONG:?}"
            );
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Blocks until there was such an event since the page was opened. Panics after the time limit.
    fn event(&mut self, method: &str) {
        let until = Instant::now() + LONG;
        while !self.events.iter().any(|event| event["method"] == method) {
            let message = self.receive(until, method);
            self.events.push_back(message);
        }
    }

    /// Blocks until the page's changes are drawn: two frames.
    pub fn settle(&mut self) {
        self.value(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => \
            done(0))))",
        );
    }

    /// Evaluates an expression in the page and returns its value; waits for a promise. Panics if it
    /// throws.
    pub fn value(&mut self, expression: &str) -> Value {
        let ask = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call("Runtime.evaluate", ask);
        assert!(
            answer.get("exceptionDetails").is_none(),
            "{expression}: {answer}"
        );
        answer["result"]["value"].take()
    }

    /// Evaluates an expression in the page and returns its value, which must be a number.
    pub fn number(&mut self, expression: &str) -> f64 {
        let value = self.value(expression);
        value
            .as_f64()
            .unwrap_or_else(|| panic!("{expression} is {value}"))
    }

    /// Evaluates an expression in the page and returns its value, which must be a text.
    pub fn text(&mut self, expression: &str) -> String {
        let value = self.value(expression);
        value
            .as_str()
            .unwrap_or_else(|| panic!("{expression} is {value}"))
            .to_owned()
    }

    /// Sends a mouse event of the DevTools protocol (as `mousePressed`) at a position (x, y) in
    /// pixels. `more` holds further fields. Waits until changes are drawn.
    pub fn mouse(&mut self, kind: &str, [x, y]: [f64; 2], more: Value) {
        let mut event = json!({"type": kind, "x": x, "y": y});
        more.as_object()
            .into_iter()
            .flatten()
            .for_each(|(name, value)| event[name] = value.clone());
        self.call("Input.dispatchMouseEvent", event);
        self.settle();
    }

    /// Clicks with the left button at a position (x, y) in pixels. Waits until changes are drawn.
    pub fn click(&mut self, at: [f64; 2]) {
        let left = json!({"button": "left", "buttons": 1, "clickCount": 1});
        self.mouse("mousePressed", at, left.clone());
        self.mouse("mouseReleased", at, left);
    }

    /// Presses and releases a key, as `ArrowRight` or a letter. Waits until changes are drawn.
    pub fn key(&mut self, key: &str) {
        let text = if key.len() == 1 {
            json!(key)
        } else {
            Value::Null
        };
        let mut down = json!({"type": "keyDown", "key": key});
        if !text.is_null() {
            down["text"] = text;
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call(
            "Input.dispatchKeyEvent",
            json!({"type": "keyUp", "key": key}),
        );
        self.settle();
    }

    /// Returns the page's errors since it was opened, console messages except those of
    /// `console.log`, and network requests. Requests for files, for data URLs and to the server of
    /// the page do not count.
    pub fn complaints(&mut self) -> Vec<String> {
        self.settle();
        while let Ok(message) = self.said.try_recv() {
            self.events.push_back(message);
        }
        let is_own = |url: &str| {
            let to_server = !self.origin.is_empty() && url.starts_with(&self.origin);
            to_server || url.starts_with("file:") || url.starts_with("data:")
        };
        let complaint = |event: &Value| {
            let params = &event["params"];
            let url = params["request"]["url"].as_str().unwrap_or_default();
            match event["method"].as_str()? {
                "Runtime.exceptionThrown" => Some(params["exceptionDetails"].to_string()),
                "Runtime.consoleAPICalled" if params["type"] != "log" => {
                    Some(params["args"].to_string())
                }
                "Log.entryAdded" => Some(params["entry"].to_string()),
                "Network.requestWillBeSent" if !is_own(url) => Some(format!("asks for {url}")),
                _ => None,
            }
        };
        self.events.iter().filter_map(complaint).collect()
    }

    /// Writes a screenshot of the page to `name.png` in the folder in `MPMD_SCREENSHOTS`. Does
    /// nothing if the variable is not set.
    pub fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("MPMD_SCREENSHOTS").map(PathBuf::from) else {
            return;
        };
        fs::create_dir_all(&folder).unwrap();
        let answer = self.call("Page.captureScreenshot", json!({"format": "png"}));
        fs::write(
            folder.join(format!("{name}.png")),
            decoded(answer["data"].as_str().unwrap()),
        )
        .unwrap();
    }

    /// Prints the page and returns the PDF. Also writes the PDF to `name.pdf` in the folder in
    /// `MPMD_SCREENSHOTS`, if that is set.
    pub fn paper(&mut self, name: &str) -> Vec<u8> {
        let answer = self.call(
            "Page.printToPDF",
            json!({"preferCSSPageSize": true, "printBackground": false}),
        );
        let paper = decoded(answer["data"].as_str().unwrap());
        if let Some(folder) = std::env::var_os("MPMD_SCREENSHOTS").map(PathBuf::from) {
            fs::write(folder.join(format!("{name}.pdf")), &paper).unwrap();
        }
        paper
    }

    /// Closes the browser, and waits until none of its processes is left. Panics after the time
    /// limit.
    pub fn end(mut self) {
        self.session.clear();
        self.call("Browser.close", json!({}));
        self.ask = None;
        let until = Instant::now() + LONG;
        while self.child.try_wait().unwrap().is_none() || !self.left().is_empty() {
            assert!(Instant::now() < until, "still running: {:?}", self.left());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the ids of running processes with this browser's profile folder in their command
    /// line.
    fn left(&self) -> Vec<u32> {
        let profile = self
            .profile
            .path()
            .to_str()
            .expect("a name of ours")
            .as_bytes();
        let mut left = Vec::new();
        for entry in fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .filter_map(Result::ok)
        {
            let Some(id) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if line.windows(profile.len()).any(|part| part == profile) {
                left.push(id);
            }
        }
        left
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        self.ask = None;
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        for id in self.left() {
            if let Some(id) = rustix::process::Pid::from_raw(id as i32) {
                let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
            }
        }
    }
}

/// Decodes base 64 with padding; other characters are not refused.
fn decoded(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = four
            .iter()
            .fold(0u32, |bits, c| bits << 6 | u32::from(digit(*c)))
            << (6 * (4 - four.len()));
        bytes.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    bytes
}

#[cfg(test)]
#[test]
fn base_64_is_decoded() {
    assert_eq!(decoded("TWFu"), b"Man");
    assert_eq!(
        (decoded("TWE="), decoded("TQ=="), decoded("")),
        (b"Ma".to_vec(), b"M".to_vec(), vec![])
    );
    assert_eq!(decoded("+/8="), [0xfb, 0xff]);
}
