//! The form of a row: [`OptionSpec`], and the macros that turn the rows of `table.rs` into the
//! struct, its defaults and the registry.

use super::Options;

/// One option, as declared by its row.
#[derive(Debug, Clone, Copy)]
pub struct OptionSpec {
    /// The key in a conf string.
    pub key: &'static str,
    /// The unit of a value.
    pub unit: &'static str,
    /// The values that the option accepts, to complete "it takes ...".
    pub accepts: &'static str,
    /// What the option does.
    pub meaning: &'static str,
    /// When to change the option, as a full sentence.
    pub change: &'static str,
    /// The worst effect that an accepted value can have.
    pub worst_case: &'static str,
    /// Whether each [`Options::apply`] begins by setting the option to its default.
    pub resets: bool,
    /// Sets the option from the value of a pair, or returns what is wrong with the value.
    pub(super) read: fn(&mut Options, &str) -> Result<(), String>,
    /// Writes the option as `read` accepts it, or as words if the default has no such form.
    pub(super) show: fn(&Options) -> String,
    /// Sets the option to its default.
    pub(super) reset: fn(&mut Options),
}

impl OptionSpec {
    /// Returns the environment variable of this option: `CUSHION_` and the key in capitals.
    pub fn env_name(&self) -> String {
        format!("CUSHION_{}", self.key.to_ascii_uppercase())
    }

    /// Returns the default, as [`show`](Self::show) writes it.
    pub fn default(&self) -> String {
        self.show(&Options::DEFAULT)
    }

    /// Returns the value in `options` as text. A conf string accepts the text, unless the option
    /// resets and the value is the default.
    pub fn show(&self, options: &Options) -> String {
        (self.show)(options)
    }

    /// Returns the description in Markdown: the meaning, then a list with the accepted values, the
    /// default, when to change the option, and the worst case.
    pub fn doc(&self) -> String {
        let Self { meaning, accepts, change, worst_case, .. } = self;
        let default = self.default();
        format!(
            "{meaning}\n\n\
             - Takes {accepts}.\n\
             - Default: {default}.\n\
             - When to change it: {change}\n\
             - Worst case: {worst_case}"
        )
    }
}

/// How a value of type `T` is written in a conf string.
pub(super) struct Form<T> {
    pub(super) unit: &'static str,
    pub(super) accepts: &'static str,
    /// Reads a value. The options hold the values of the rows above, and of this row so far.
    pub(super) read: fn(&Options, &str) -> Result<T, String>,
    pub(super) show: fn(&T) -> String,
}

/// Declares the options. Each field of [`Options`] has a type, a default, and one row per key that
/// sets it; the field is `kept`, or `resets` with every conf string. The description of the field
/// is the meaning of its rows, followed by the comments above the field.
macro_rules! options {
    (
        $(#[$struct_doc:meta])*
        pub struct Options;
        $(
            $(#[$note:meta])*
            $field:ident: $type:ty = $default:expr, $lasts:ident;
            $(
                $key:literal: $form:tt {
                    meaning: $meaning:literal,
                    change: $change:literal,
                    worst_case: $worst_case:literal,
                }
            )+
        )+
    ) => {
        $(#[$struct_doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct Options {
            $(
                $(
                    #[doc = concat!("`", $key, "`: ", $meaning)]
                    #[doc = ""]
                )+
                $(#[$note])*
                pub $field: $type,
            )+
        }

        impl Options {
            /// The options of an empty conf string.
            pub const DEFAULT: Self = Self { $( $field: $default, )+ };
        }

        /// All options, in the order in which they are read and shown.
        pub static REGISTRY: &[OptionSpec] = &[$($({
            const FORM: Form<$type> = form!($form);
            OptionSpec {
                key: $key,
                unit: FORM.unit,
                accepts: FORM.accepts,
                meaning: $meaning,
                change: $change,
                worst_case: $worst_case,
                resets: lasts!($lasts),
                read: |options, text| {
                    options.$field = (FORM.read)(options, text)?;
                    Ok(())
                },
                show: |options| (FORM.show)(&options.$field),
                reset: |options| options.$field = Options::DEFAULT.$field,
            }
        }),+),+];
    };
}

macro_rules! lasts {
    (kept) => {
        false
    };
    (resets) => {
        true
    };
}

/// The [`Form`] of a row: a kind of value with its range in parentheses, or a form in braces where
/// the option has one of its own.
macro_rules! form {
    ((flag)) => {
        Form {
            unit: "True or False",
            accepts: "`True` or `False`",
            read: |_, text| boolean(text),
            show: |value| boolean_text(*value),
        }
    };
    ((mib $($range:tt)*)) => {
        Form {
            unit: "MiB",
            accepts: concat!("a whole number of MiB", words!($($range)*)),
            read: |_, text| {
                in_range(whole(text)?, range!($($range)*), words!($($range)*)).map(bytes)
            },
            show: |value| mib_text(*value),
        }
    };
    ((ms $($range:tt)*)) => { form!((whole "ms", " of milliseconds", $($range)*)) };
    ((us $($range:tt)*)) => { form!((whole "µs", " of microseconds", $($range)*)) };
    ((times $($range:tt)*)) => { form!((whole "times", "", $($range)*)) };
    ((whole $unit:literal, $of:literal, $($range:tt)*)) => {
        Form {
            unit: $unit,
            accepts: concat!("a whole number", $of, words!($($range)*)),
            read: |_, text| {
                in_range(whole(text)?, range!($($range)*), words!($($range)*))
            },
            show: u64::to_string,
        }
    };
    ((number $unit:literal, from $least:literal to $most:literal)) => {
        Form {
            unit: $unit,
            accepts: concat!("a number", words!(from $least to $most)),
            read: |_, text| {
                let range = f64::from($least)..=f64::from($most);
                in_range(number(text)?, range, words!(from $least to $most))
            },
            show: |value| number_text(*value),
        }
    };
    ({ $($form:tt)* }) => {
        Form { $($form)* }
    };
}

/// A range in words, to follow the kind of value.
macro_rules! words {
    () => {
        ""
    };
    (above $least:literal) => {
        concat!(" above ", $least)
    };
    (from $least:literal to $most:literal) => {
        concat!(" from ", $least, " to ", $most)
    };
}

/// The same range of whole numbers, as bounds.
macro_rules! range {
    () => {
        ..
    };
    (above $least:literal) => {
        (Bound::Excluded($least), Bound::Unbounded)
    };
    (from $least:literal to $most:literal) => {
        $least..=$most
    };
}

pub(super) use {form, lasts, options, range, words};
