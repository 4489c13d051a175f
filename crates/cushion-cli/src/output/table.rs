//! Text tables: columns as wide as their widest cell, readable without colour.

/// The alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// For names.
    Left,
    /// For figures.
    Right,
}

/// A table under construction.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(columns: Vec<(&'static str, Align)>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row, with a cell for each column.
    pub(crate) fn add(&mut self, row: Vec<String>) {
        debug_assert_eq!(row.len(), self.columns.len(), "a cell for each column");
        self.rows.push(row);
    }

    /// Returns the header and the rows; empty if there are no rows.
    pub(crate) fn lines(&self) -> Vec<String> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        let head: Vec<String> = self.columns.iter().map(|&(name, _)| name.to_owned()).collect();
        let rows = || std::iter::once(&head).chain(&self.rows);
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| rows().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).zip(&self.columns);
            let cells = cells.map(|((cell, &width), &(_, align))| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        rows().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(vec![("name", Align::Left), ("size", Align::Right)]);
        assert_eq!(table.lines(), [""; 0]);
        table.add(vec!["é".to_owned(), "12".to_owned()]);
        table.add(vec!["longer".to_owned(), "12345".to_owned()]);
        assert_eq!(table.lines(), ["name     size", "é          12", "longer  12345"]);
    }
}
