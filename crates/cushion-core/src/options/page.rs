//! The reference page of all options, generated from the tables.

use std::fmt::Write;

use super::{NOT_OURS, REGISTRY, SETTINGS};

/// Returns the text of `docs/options.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Options\n\
         \n\
         <!-- Generated from the tables in crates/cushion-core/src/options: change them. -->\n\
         \n\
         Options are written as `key:value,key:value`, with the syntax, keys and values of \
         `PYTORCH_CUDA_ALLOC_CONF`. White space is ignored. An unknown key, a bad value or a \
         missing `:` or `,` is an error, and then no option changes.\n\
         \n\
         Each time a conf string is applied, the options marked *resets* return to their default \
         unless the string names them. The others keep their value.\n\
         \n\
         Under PyTorch, options come from these sources. A later source overrides an earlier one:\n\
         \n\
         1. The first variable that is set of `PYTORCH_CUDA_ALLOC_CONF`, \
         `PYTORCH_HIP_ALLOC_CONF` and `PYTORCH_ALLOC_CONF`. PyTorch also reads only that one.\n\
         2. `CUSHION_CONF`.\n\
         3. `CUSHION_POLICY`.\n\
         4. The variable of each option.\n\
         5. The arguments of `cushion.install()`.\n\
         \n\
         | name | variable | default | meaning |\n\
         |---|---|---|---|\n",
    );
    // Writing to a string cannot fail, here and below.
    for spec in SETTINGS {
        let _ = writeln!(
            page,
            "| `{}` | `{}` | {} | {} Takes {}. |",
            spec.name, spec.variable, spec.default, spec.meaning, spec.accepts,
        );
    }
    page.push_str("\n| option | variable | unit | default | resets |\n|---|---|---|---|---|\n");
    for spec in REGISTRY {
        let resets = if spec.resets { "resets" } else { "" };
        let _ = writeln!(
            page,
            "| [`{key}`](#{key}) | `{variable}` | {unit} | {default} | {resets} |",
            key = spec.key,
            variable = spec.env_name(),
            unit = spec.unit,
            default = spec.default(),
        );
    }
    for spec in REGISTRY {
        let _ = write!(page, "\n## {}\n\n{}\n", spec.key, spec.doc());
    }
    page.push_str(
        "\n## Accepted without effect\n\
         \n\
         These keys of PyTorch are accepted with any value, so that an existing conf string keeps \
         working. Cushion does not act on them.\n\
         \n\
         | key | reason |\n\
         |---|---|\n",
    );
    for spec in NOT_OURS {
        let _ = writeln!(page, "| `{}` | {} |", spec.key, spec.why);
    }
    page
}
