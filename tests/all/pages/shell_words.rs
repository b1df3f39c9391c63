//! Divides a command into the words that a shell would make of it, as far as the pages go.

/// Returns the simple commands of a line or several: the words of each, without variables set
/// before it, redirections and comments. Quotes are removed.
pub(super) fn simple_commands(text: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    for word in words(text) {
        let last = commands.last_mut().expect("never empty");
        match word {
            Word::Separator => commands.push(Vec::new()),
            Word::Plain(word) if last.is_empty() && sets_variable(&word) => {}
            Word::Plain(word) => last.push(word),
        }
    }
    commands.retain(|command| !command.is_empty());
    commands
}

enum Word {
    Plain(String),
    /// The end of a simple command.
    Separator,
}

fn words(text: &str) -> Vec<Word> {
    let text = text.replace("\\\n", " ");
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut is_target = false;
    let mut chars = text.chars().peekable();

    while let Some(char) = chars.next() {
        if quote == Some(char) {
            quote = None;
            continue;
        }
        if quote.is_some() {
            word.get_or_insert_default().push(char);
            continue;
        }
        let ends = matches!(char, ' ' | '\n' | '|' | ';' | '&' | '>');
        if ends && let Some(word) = word.take() {
            // The file after `>` is no argument.
            if !std::mem::take(&mut is_target) {
                words.push(Word::Plain(word));
            }
        }
        match char {
            '\'' | '"' => {
                quote = Some(char);
                word.get_or_insert_default();
            }
            '#' if word.is_none() => while chars.next_if(|next| *next != '\n').is_some() {},
            '\n' | '|' | ';' | '&' => words.push(Word::Separator),
            '>' => is_target = true,
            ' ' => {}
            char => word.get_or_insert_default().push(char),
        }
    }
    if let Some(word) = word
        && !is_target
    {
        words.push(Word::Plain(word));
    }
    words
}

/// Returns true for `NAME=VALUE`.
fn sets_variable(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty()
            && name
                .chars()
                .all(|char| char.is_ascii_uppercase() || char == '_')
    })
}

#[test]
fn words_are_those_of_a_shell() {
    let commands = simple_commands(
        "A_B=1 one --x 'two words' # why\necho '{\"a\":\n1}' | three \\\n  -y > file && four 2 5",
    );
    let expected: [&[&str]; 4] = [
        &["one", "--x", "two words"],
        &["echo", "{\"a\":\n1}"],
        &["three", "-y"],
        &["four", "2", "5"],
    ];
    assert_eq!(commands, expected);
}
