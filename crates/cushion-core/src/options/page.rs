//! The reference page, generated from the tables.

use std::fmt::Write;

use super::{NOT_OURS, REGISTRY, SETTINGS};

/// The text of `docs/options.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Options\n\
         \n\
         <!-- Generated from the tables in crates/cushion-core/src/options: change them. -->\n\
         \n\
         Options are given as `key:value,key:value`, in the syntax of `PYTORCH_CUDA_ALLOC_CONF` \
         and with its keys and values. White space is \
         ignored. An unknown key, a bad value or a missing `:` or `,` is an error, and nothing is \
         changed then.\n\
         \n\
         Each time a conf string is applied, the options marked *resets* go back to their default \
         unless the string names them. The others keep their value.\n\
         \n\
         Under PyTorch, what is given later in this list wins: the first that is set of \
         `PYTORCH_CUDA_ALLOC_CONF`, `PYTORCH_HIP_ALLOC_CONF` and `PYTORCH_ALLOC_CONF` (PyTorch reads \
         no more than that one either); `CUSHION_CONF`; `CUSHION_POLICY`; the variable of each \
         option; the arguments of `cushion.install()`.\n\
         \n\
         | setting of a process | variable | default | |\n\
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
    page.push_str("\n| option | variable | unit | default | |\n|---|---|---|---|---|\n");
    for spec in REGISTRY {
        let resets = if spec.resets { "resets" } else { "" };
        let _ = writeln!(
            page,
            "| [`{key}`](#{key}) | `{variable}` | {unit} | {default} | {resets} |",
            key = spec.key,
            variable = spec.env_name(),
            unit = spec.unit,
            default = spec.default,
        );
    }
    for spec in REGISTRY {
        let _ = write!(page, "\n## {}\n\n{}\n\nTakes {}.\n", spec.key, spec.doc(), spec.accepts);
    }
    page.push_str(
        "\n## Accepted, but not ours\n\
         \n\
         These keys of PyTorch are accepted with any value, so that an existing conf string keeps \
         working. Cushion does not act on them.\n\
         \n\
         | key | why not |\n\
         |---|---|\n",
    );
    for spec in NOT_OURS {
        let _ = writeln!(page, "| `{}` | {} |", spec.key, spec.why);
    }
    page
}
