//! Finds the kernels in a source and rewrites dynamic shared memory, so that a C++ compiler for the
//! CPU accepts the source.
//!
//! The input is preprocessed, so it has no comments and no macros. CUDA's keywords are still in it.

/// A source that a C++ compiler accepts, and the kernels that programs can find by plain names.
#[derive(Debug, PartialEq)]
pub(crate) struct Prepared {
    pub(crate) text: String,
    pub(crate) kernels: Vec<Kernel>,
}

/// A kernel: its name, and the largest number of threads per block, as a C++ expression.
#[derive(Debug, PartialEq)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) threads: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Token<'a> {
    Word(&'a str),
    Text(&'a str),
    Mark(char),
}

/// Finds the kernels of a source. Replaces declarations of dynamic shared memory: `extern
/// __shared__ T x[];` becomes a pointer to the launch's memory.
///
/// # Errors
///
/// A message, if dynamic shared memory is declared in an unsupported way.
pub(crate) fn prepare(source: &str) -> Result<Prepared, String> {
    let tokens = tokens(source);
    Ok(Prepared {
        kernels: kernels(source, &tokens),
        text: define_shared(source, &tokens)?,
    })
}

/// Splits a source into words, literals and single characters, as (byte offset, token). Skips lines
/// that begin with `#`.
fn tokens(source: &str) -> Vec<(usize, Token<'_>)> {
    let bytes = source.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    let mut fresh_line = true;
    while at < bytes.len() {
        let byte = bytes[at];
        let start = at;
        if byte == b'\n' {
            fresh_line = true;
            at += 1;
            continue;
        }

        if byte.is_ascii_whitespace() {
            at += 1;
            continue;
        }
        if byte == b'#' && fresh_line {
            at += source[at..].find('\n').unwrap_or(bytes.len() - at);
            continue;
        }

        fresh_line = false;
        if byte == b'"' || byte == b'\'' {
            at += 1;
            while at < bytes.len() && bytes[at] != byte {
                at += if bytes[at] == b'\\' { 2 } else { 1 };
            }
            at = (at + 1).min(bytes.len());
            tokens.push((start, Token::Text(source.get(start..at).unwrap_or(""))));
        } else if byte.is_ascii_alphanumeric() || byte == b'_' {
            // A number may contain quotes as separators, as in 1'000; they start no literal.
            let number = byte.is_ascii_digit();
            while at < bytes.len()
                && (bytes[at].is_ascii_alphanumeric()
                    || bytes[at] == b'_'
                    || (number && bytes[at] == b'\''))
            {
                at += 1;
            }
            tokens.push((start, Token::Word(&source[start..at])));
        } else {
            let mark = source[at..].chars().next().unwrap_or(' ');
            at += mark.len_utf8();
            tokens.push((start, Token::Mark(mark)));
        }
    }
    tokens
}

/// Returns the kernels that are outside of namespaces and are not templates, each once.
fn kernels(source: &str, tokens: &[(usize, Token<'_>)]) -> Vec<Kernel> {
    let mut found: Vec<Kernel> = Vec::new();
    // For each open brace: true if it belongs to `extern "C"`.
    let mut open: Vec<bool> = Vec::new();
    for (at, (_, token)) in tokens.iter().enumerate() {
        match token {
            Token::Mark('{') => {
                let before: Vec<_> = tokens[at.saturating_sub(2)..at]
                    .iter()
                    .map(|(_, token)| token)
                    .collect();
                open.push(before == [&Token::Word("extern"), &Token::Text("\"C\"")]);
            }
            Token::Mark('}') => {
                open.pop();
            }
            Token::Word("__global__") if open.iter().all(|only_language| *only_language) => {
                let begins = tokens[..at]
                    .iter()
                    .rposition(|(_, token)| matches!(token, Token::Mark(';' | '{' | '}')))
                    .map_or(0, |before| before + 1);
                let template = tokens[begins..at]
                    .iter()
                    .any(|(_, token)| *token == Token::Word("template"));

                // A declaration may come first, with or without launch bounds.
                if let Some(kernel) = kernel_after(source, &tokens[at..]).filter(|_| !template) {
                    match found.iter_mut().find(|known| known.name == kernel.name) {
                        Some(_) if kernel.threads == UNBOUND => {}
                        Some(known) => *known = kernel,
                        None => found.push(kernel),
                    }
                }
            }
            _ => {}
        }
    }
    found
}

/// Largest number of threads per block for a kernel without launch bounds.
const UNBOUND: &str = "1024";

/// Returns the kernel that is declared after `__global__`: the name before the parameter list, and
/// the first launch bound. `None` if no name follows.
fn kernel_after(source: &str, tokens: &[(usize, Token<'_>)]) -> Option<Kernel> {
    let mut threads = UNBOUND.to_owned();
    for (at, pair) in tokens.windows(2).enumerate() {
        let (Token::Word(word), (open, Token::Mark('('))) = (&pair[0].1, &pair[1]) else {
            continue;
        };
        match *word {
            "__launch_bounds__" => {
                let mut depth = 0;
                let end = tokens[at + 1..].iter().find(|(_, token)| {
                    match token {
                        Token::Mark('(') => depth += 1,
                        Token::Mark(')') => depth -= 1,
                        _ => {}
                    }
                    depth == 0 || (depth == 1 && *token == Token::Mark(','))
                })?;
                threads = source[*open + 1..end.0].trim().to_owned();
            }
            "__attribute__" | "alignas" | "__align__" => {}
            name => {
                return Some(Kernel {
                    name: name.to_owned(),
                    threads,
                });
            }
        }
    }
    None
}

fn define_shared(source: &str, tokens: &[(usize, Token<'_>)]) -> Result<String, String> {
    let mut text = String::with_capacity(source.len());
    let mut copied = 0;
    let mut depth = 0_usize;
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at].1 {
            Token::Mark('{') => depth += 1,
            Token::Mark('}') => depth = depth.saturating_sub(1),
            Token::Word("extern")
                if tokens
                    .get(at + 1)
                    .is_some_and(|next| next.1 == Token::Word("__shared__")) =>
            {
                let end = tokens[at..]
                    .iter()
                    .position(|(_, token)| *token == Token::Mark(';'))
                    .map(|length| at + length)
                    .ok_or("a declaration of dynamic shared memory has no `;`")?;
                if depth == 0 {
                    return Err("dynamic shared memory must be declared inside a function".into());
                }

                let (kind, name) = shared_parts(source, &tokens[at + 2..=end])
                    .ok_or("declare dynamic shared memory as: extern __shared__ type name[];")?;
                text.push_str(&source[copied..tokens[at].0]);
                text.push_str(&format!("{kind} *{name} = ({kind} *)__sc_here.shared;"));
                copied = tokens[end].0 + 1;
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    text.push_str(&source[copied..]);
    Ok(text)
}

/// Returns (type, name) of a declaration `type name [ ] ;`, without alignment specifiers. `None`
/// for any other form.
fn shared_parts(source: &str, mut tokens: &[(usize, Token<'_>)]) -> Option<(String, String)> {
    while let Some((_, Token::Word("__align__" | "alignas"))) = tokens.first() {
        let close = tokens
            .iter()
            .position(|(_, token)| *token == Token::Mark(')'))?;
        tokens = &tokens[close + 1..];
    }

    let [
        kind @ ..,
        (name_at, Token::Word(name)),
        (_, Token::Mark('[')),
        (_, Token::Mark(']')),
        (_, Token::Mark(';')),
    ] = tokens
    else {
        return None;
    };

    let (kind_at, _) = kind.first()?;
    Some((
        source[*kind_at..*name_at].trim().to_owned(),
        (*name).to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_kernels_are_found_with_their_bounds() {
        let source = r#"
            extern "C" __global__ void plain(float *x);
            extern "C" __global__ void plain(float *x) { if (x) { *x = 1; } }
            extern "C" { __global__ __launch_bounds__(8 * (30 + 2), 4) void bounded(int n) {} }
            template <class T> __global__ void generic(T *x) {}
            namespace inside { __global__ void hidden() {} }
            __device__ void helper() { const char *t = "__global__ void no("; char q = '"'; }
            __device__ void digits() { int n = 1'000; }
            __global__ void last() {}
        "#;
        let kernels = prepare(source).unwrap().kernels;
        let found: Vec<_> = kernels
            .iter()
            .map(|kernel| (&kernel.name[..], &kernel.threads[..]))
            .collect();
        assert_eq!(
            found,
            [
                ("plain", "1024"),
                ("bounded", "8 * (30 + 2)"),
                ("last", "1024")
            ]
        );
    }

    #[test]
    fn dynamic_shared_memory_becomes_a_pointer() {
        let source =
            "void k() { extern __shared__ __align__(16) unsigned char bytes[]; bytes[0] = 1; }";
        assert_eq!(
            prepare(source).unwrap().text,
            "void k() { unsigned char *bytes = (unsigned char *)__sc_here.shared; bytes[0] = 1; }"
        );
        assert!(prepare("extern __shared__ float x[];").is_err());
    }
}
