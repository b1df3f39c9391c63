//! Reads the commands of the pages, and the output that a page shows for them.

use std::fs;
use std::path::{Path, PathBuf};

/// A command of a page.
pub(super) struct PageCommand {
    /// The page's path below the repository.
    pub(super) page: String,
    /// The number of the command's first line in the page.
    pub(super) line: usize,
    /// The command for a shell, perhaps in several lines.
    pub(super) text: String,
    /// The costs of stages in TOML that the page shows between the command before and this one.
    pub(super) costs: Option<String>,
    /// The output that the page shows, for a command with the prompt `$`.
    pub(super) output: Option<Vec<String>>,
}

impl PageCommand {
    /// Returns the place in the repository, for messages.
    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.page, self.line)
    }
}

/// Returns the repository's root.
pub(super) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests lie in the repository")
        .to_owned()
}

/// Returns the paths of the README and of all pages of the guide, below the repository.
pub(super) fn pages() -> Vec<String> {
    let guide = repository().join("docs/guide");
    let names = fs::read_dir(guide)
        .expect("the guide")
        .map(|entry| entry.expect("a page").file_name())
        .map(|name| format!("docs/guide/{}", name.to_string_lossy()))
        .filter(|page| page.ends_with(".md"));

    let mut pages: Vec<String> = names.collect();
    pages.push("README.md".to_owned());
    pages.sort();
    pages
}

/// Returns the commands of a page: those of blocks marked `sh`, and those after the prompt `$` in
/// blocks marked `text`.
pub(super) fn commands_of(page: &str) -> Vec<PageCommand> {
    let text = fs::read_to_string(repository().join(page)).expect("a page");
    let mut commands: Vec<PageCommand> = Vec::new();
    let mut block: Option<&str> = None;
    let mut costs: Option<String> = None;

    for (number, line) in text.lines().enumerate() {
        if let Some(language) = line.strip_prefix("```") {
            block = block.is_none().then_some(language);
            continue;
        }

        let mut begin = |text: &str, output| PageCommand {
            page: page.to_owned(),
            line: number + 1,
            text: text.to_owned(),
            costs: costs.take(),
            output,
        };
        let shown = line.strip_prefix("$ ");
        match (block, shown, commands.last_mut()) {
            (Some("sh"), _, Some(last)) if last.page_line_is_open(number) => {
                last.text.push('\n');
                last.text.push_str(line);
            }
            (Some("sh"), ..) if !line.trim().is_empty() && !line.starts_with('#') => {
                commands.push(begin(line, None));
            }
            (Some("text"), Some(command), _) => commands.push(begin(command, Some(Vec::new()))),
            (Some("text"), None, Some(last)) if last.is_shown_until(number) => {
                let output = last.output.get_or_insert_default();
                output.push(line.to_owned());
            }
            (Some("toml"), ..) if costs.is_some() || line.starts_with("unit = ") => {
                let costs = costs.get_or_insert_default();
                costs.push_str(line);
                costs.push('\n');
            }
            _ => {}
        }
    }
    commands
}

impl PageCommand {
    /// Returns true if the line with this index continues the command.
    fn page_line_is_open(&self, index: usize) -> bool {
        let follows = self.line + self.text.lines().count() == index + 1;
        let last = self.text.trim_end();
        let quotes = self.text.matches('\'').count();
        let is_open = last.ends_with(['\\', '|']) || quotes % 2 == 1;
        follows && is_open && self.output.is_none()
    }

    /// Returns true if the line with this index belongs to the command's output: the lines follow
    /// each other.
    fn is_shown_until(&self, index: usize) -> bool {
        let shown = self.output.as_ref().map(Vec::len);
        shown.is_some_and(|lines| self.line + lines == index)
    }
}

#[test]
fn commands_of_blocks_are_read_with_their_continuations_and_output() {
    let all: Vec<PageCommand> = pages().iter().flat_map(|page| commands_of(page)).collect();
    // Far below the true number: pages that are not read at all would pass every other test.
    assert!(all.len() > 100, "only {} commands", all.len());

    let question = all
        .iter()
        .find(|command| command.text.contains("plan rules"));
    let question = question.expect("the guide shows a question to the planner of rules");
    assert!(question.text.lines().count() > 1, "{}", question.text);

    let shown = all
        .iter()
        .find(|command| command.text.starts_with("mpmd schedule zb-h1 --ranks 4"));
    let output = shown.and_then(|command| command.output.as_ref());
    let lines = output.expect("the guide shows a schedule's table").len();
    assert!(lines > 5, "{lines} lines of output");
}
