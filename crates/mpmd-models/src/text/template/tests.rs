//! Tests of templates: their limits, their texts, and what they leave out.

use super::*;

fn settings() -> RenderSettings<'static> {
    RenderSettings {
        quoted: None,
        day: "2024-07-04".parse().unwrap(),
        variables: &[],
    }
}

/// Returns the text that a template makes, whether or not it has all messages.
fn text(source: &str, conversation: &Conversation) -> Result<String, TemplateFault> {
    let template = Template::new(source, BTreeMap::new())?;
    with_large_stack(|| {
        let (_, text) = template.prepared(conversation, settings(), true)?;
        Ok(text.text)
    })
}

/// Returns the prompt that a template makes.
fn prompt(source: &str, conversation: &Conversation) -> Result<String, TemplateFault> {
    let template = Template::new(source, BTreeMap::new())?;
    let templates = Templates {
        all: [None, Some(template)],
    };
    let text = templates.prompt(conversation, settings())?;
    Ok(text.text)
}

#[test]
fn templates_that_need_too_much_are_refused() {
    let conversation = Conversation::of_user(&"a".repeat(1000));
    for source in [
        "{{ messages | tojson(indent=99999999999) }}",
        "{{ 'ab' * 99999999999999 }}",
        "{{ 'ab' * 999999999 }}",
        "{{ [1, 2] * 99999999999999 }}",
        "{{ range(99999999999) | list }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}\
         {% endfor %}{{ n.x | length }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}\
         {% endfor %}{{ n.x | length }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ n.x | tojson }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(300) %}{% set n.x = [n.x] %}\
         {% endfor %}{{ n.x }}",
        "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
        "{% set n = namespace() %}{% set n.x = n %}{{ n | tojson }}",
        "{% set n = namespace() %}{% set n.x = n %}{{ n | string }}",
        "{% set n = namespace() %}{% set n.x = [n] %}{{ n.x }}",
        "{% set n = namespace() %}{% set n.x = n %}{{ n == n.x or n < n.x }}\
         {{ raise_exception('no end') }}",
        "{{ messages[0].content | replace('a', messages[0].content) | replace('a', \
         messages[0].content) | replace('a', messages[0].content) }}",
        "{{ messages[0].content | list | join(messages[0].content) | list | \
         join(messages[0].content) | list | join(messages[0].content) }}",
        "{{ messages[0].content.replace('a', messages[0].content).replace('a', \
         messages[0].content).replace('a', messages[0].content) }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}\
         {% set n.x = [n.x, n.x] | sum(start=[]) %}{% endfor %}{{ n.x | length }}",
        "{{ ([1] * 999999999) | list | length }}",
        "{{ [1] | batch(999999999, 1) | list }}",
        "{{ [1] | slice(999999999) | list | length }}",
        "{{ 'a' | indent(999999999, true) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a'.center(999999999) }}{{ 'a'.ljust(999999999) }}{{ 'a'.zfill(999999999) }}",
        "{{ '%999999999d' | format(5) }}{{ '%999999999d' % 5 }}",
        "{{ '{:999999999}'.format(5) }}",
        "{{ '{:>1000000000000000}'.format('x') }}",
        "{{ '{:.999999999f}'.format(0.5) }}",
        "{{ '{:{}}'.format('x', 999999999) }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ n.x == n.x[0] }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ n.x in [n.x[0], 1] }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ n.x is eq(n.x[0]) }}{{ [n.x, n.x[0]] | sort }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ [n.x, n.x[0]] | unique | list }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ {n.x: 1} }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ {'a': 1}[n.x] }}",
        "{{ strftime_now('%') }}",
    ] {
        let found = text(source, &conversation);
        assert!(found.is_err(), "{source}");
    }
}

#[test]
fn values_inside_each_other_are_dropped() {
    let open = ["[", "{'a': "];
    let close = ["]", "}"];
    for (open, close) in open.into_iter().zip(close) {
        let value = format!("{}n.x{}", open.repeat(50), close.repeat(50));
        let source = format!(
            "{{% set n = namespace(x=[1]) %}}{{% for i in range(90000) %}}\
             {{% set n.x = {value} %}}{{% endfor %}}end"
        );
        let found = text(&source, &Conversation::of_user("a"));
        assert!(found.unwrap_err().to_string().contains("fuel"));
    }
}

#[test]
fn templates_find_what_python_has() {
    let object = r#"{"messages": [{"role": "user", "content": "a b  c"}],
        "chat_template_kwargs": {"one": 1.0, "small": 1e-7, "large": 1e22, "half": 0.5,
        "list": [1, 2.0, null, true, "it's", {"a": "b\n"}]}}"#;
    let conversation = Conversation::of_json(object.as_bytes()).unwrap();
    for (source, expected) in [
        ("{{ strftime_now('%d %b %Y') }}", "04 Jul 2024"),
        (
            "{{ one }} {{ half }} {{ small }} {{ large }} {{ 3 }}",
            "1.0 0.5 1e-07 1e+22 3",
        ),
        (
            "{{ list }}",
            "[1, 2.0, None, True, \"it's\", {'a': 'b\\n'}]",
        ),
        ("{{ list | string | length }}", "42"),
        (
            "{{ 'text' is sequence }} {{ 'text' is iterable }}",
            "True True",
        ),
        ("{{ none is iterable }} {{ 3 is sequence }}", "False False"),
        ("{{ messages[0].content.split() }}", "['a', 'b', 'c']"),
        ("{{ messages[0].content.rsplit(' ', 1) }}", "['a b ', 'c']"),
        (
            "{{ messages[0].content.partition(' ') }}",
            "['a', ' ', 'b  c']",
        ),
        (
            "{{ messages[0].content.rpartition('x') }}",
            "['', '', 'a b  c']",
        ),
        (
            "{{ 'ab'.removeprefix('a') }}{{ 'ab'.removesuffix('b') }}",
            "ba",
        ),
        ("{{ '**{}** of 2024'.format('ab') }}", "**ab** of 2024"),
        (
            "{{ '{{:99999}} {:>4}|{:.2f}'.format('a', 0.5) }}",
            "{:99999}    a|0.50",
        ),
        (
            "{{ 'äb'.index('b') }}{{ messages[0].copy().role }}",
            "1user",
        ),
    ] {
        let found = text(source, &conversation).unwrap();
        assert_eq!(found, expected, "{source}");
    }
}

/// Reads a list of messages.
fn messages(list: &str) -> Conversation {
    Conversation::of_json(format!("{{\"messages\": {list}}}").as_bytes()).unwrap()
}

#[test]
fn messages_that_the_model_must_know_of_are_never_left_out() {
    let system = "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}";
    let user = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}\
                {% endif %}{% endfor %}";
    let both = format!("{system}{user}");
    let asked = r#"{"role": "user", "content": " Hey "}"#;
    for (source, before, expected) in [
        (&*both, r#"{"role": "system", "content": "S"}"#, Ok("S|Hey")),
        (
            &*both,
            r#"{"role": "developer", "content": "S"}"#,
            Ok("S|Hey"),
        ),
        (
            &*both,
            r#"{"role": "assistant", "content": "S"}"#,
            Ok("Hey"),
        ),
        (&*both, r#"{"role": "system", "content": ""}"#, Ok("|Hey")),
        (
            user,
            r#"{"role": "system", "content": "S"}"#,
            Err("message 0"),
        ),
        // The same text is in another message.
        (
            user,
            r#"{"role": "system", "content": "Hey"}"#,
            Err("message 0"),
        ),
        (
            user,
            r#"{"role": "developer", "content": "S"}"#,
            Err("message 0"),
        ),
        (
            user,
            r#"{"role": "narrator", "content": "S"}"#,
            Err("message 0"),
        ),
        (
            system,
            r#"{"role": "system", "content": "S"}"#,
            Err("message 1"),
        ),
        (
            "{{ messages | tojson }}",
            r#"{"role": "system", "content": "\"S\""}"#,
            Ok("[{"),
        ),
    ] {
        let found = prompt(source, &messages(&format!("[{before}, {asked}]")));
        match (found, expected) {
            (Ok(found), Ok(expected)) => assert!(found.starts_with(expected), "{found}"),
            (Err(why), Err(expected)) => {
                let said = why.to_string();
                assert!(said.contains(expected), "{said}");
            }
            (found, _) => panic!("{source} {before}: {found:?}"),
        }
    }
    // The result of a tool that the model waits for, and one that is answered.
    let result = r#"{"role": "tool", "content": "3"}"#;
    let lost = prompt(user, &messages(&format!("[{asked}, {result}]"))).unwrap_err();
    assert!(lost.to_string().contains("message 1,"), "{lost}");
    assert_eq!(
        prompt(user, &messages(&format!("[{result}, {asked}]"))).unwrap(),
        "Hey"
    );
}

#[test]
fn calls_have_the_form_that_templates_take() {
    let call = r#"{"id": "1", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}}"#;
    let list = format!(
        r#"[{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": null,
        "tool_calls": [{call}]}}]"#
    );
    let asks = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\
                {% for c in m.tool_calls %}{{ ARGUMENTS }}{% endfor %}{% endfor %}";
    for (arguments, expected) in [
        ("c.function.arguments | tojson", r#"uaa{"b": 1, "a": 2}"#),
        ("c.function.arguments.b", "uaa1"),
        // Templates that know texts alone, and that take both.
        ("'x' + c.function.arguments", r#"uaax{"b": 1, "a": 2}"#),
        (
            "c.function.arguments if c.function.arguments is string else 'object'",
            r#"uaa{"b": 1, "a": 2}"#,
        ),
    ] {
        let source = asks.replace("ARGUMENTS", arguments);
        assert_eq!(prompt(&source, &messages(&list)).unwrap(), expected);
    }
    let none = "{{ messages[0].content }}{{ messages[1].content is none }}";
    assert_eq!(prompt(none, &messages(&list)).unwrap(), "aTrue");
}

#[test]
fn fuzz_templates() {
    let samples = [
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}\
         {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        "{%- if messages[0].role == 'system' %}{{ messages[0].content.split('a')[-1] }}\
         {%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}\
         {% for m in rest %}\
         {% if loop.index0 % 2 != 0 %}{{ raise_exception('odd') }}{% endif %}\
         {% generation %}{{ m | tojson(indent=2) }}{% endgeneration %}{% endfor %}",
        "{% macro f(x, n=2) %}{{ x * n }}{% endmacro %}{% set ns = namespace(a=0) %}\
         {% for m in messages %}{% set ns.a = ns.a + m.content | length %}{% endfor %}\
         {{ f('ab', ns.a) }}{{ none }}{{ true }}{{ strftime_now }}",
    ];
    let messages = r#"{"messages": [{"role": "system", "content": "Say a {{ word }}."},
        {"role": "user", "content": "日本 {% endif %} a"}]}"#;
    let messages = Conversation::of_json(messages.as_bytes()).unwrap();
    let special = BTreeMap::from([("eos_token".to_owned(), "</s>".to_owned())]);
    let samples = samples.map(|sample| sample.as_bytes().to_vec());
    mpmd_fuzz::bytes("templates", &samples, |source| {
        let source = String::from_utf8_lossy(source);
        let Ok(template) = Template::new(&source, special.clone()) else {
            return;
        };
        let templates = Templates {
            all: [None, Some(template)],
        };
        if let Ok(prompt) = templates.prompt(&messages, settings()) {
            assert!(!prompt.text.contains(marks::REPLY));
        }
    });
}

#[test]
fn many_messages_are_looked_for_at_once() {
    let system = r#"{"role": "system", "content": "S"},"#.repeat(5000);
    let list = format!("[{system} {{\"role\": \"user\", \"content\": \"Hey\"}}]");
    let all = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let found = prompt(all, &messages(&list)).unwrap();
    assert_eq!(found.len(), 5003);
    let all_but_one = "{% for m in messages %}{% if loop.index0 != 77 %}{{ m.content }}\
                       {% endif %}{% endfor %}";
    let said = prompt(all_but_one, &messages(&list))
        .unwrap_err()
        .to_string();
    assert!(said.contains("message 77, of the role system"), "{said}");
}

#[test]
fn keys_are_read_by_templates_that_have_the_whole_word() {
    let object = r#"{"messages": [{"role": "user", "content": "a", "id": 5, "mood": "x"}]}"#;
    let conversation = Conversation::of_json(object.as_bytes()).unwrap();
    let unread = |source: &str| -> Vec<String> {
        let templates = Templates {
            all: [None, Some(Template::new(source, BTreeMap::new()).unwrap())],
        };
        let keys = templates.unread_keys(&conversation);
        keys.map(|(at, key)| format!("{at} {key}")).collect()
    };
    assert_eq!(unread("{{ identity }} {{ moody }}"), ["0 id", "0 mood"]);
    assert_eq!(unread("{{ messages[0]['id'] }}{{ m.mood }}"), [""; 0]);
}
