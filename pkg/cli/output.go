package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// column is one column of a table about T.
type column[T any] struct {
	name  string
	value func(T) string
}

func checkOutput(format string) error {
	switch format {
	case "table", "json", "yaml":
		return nil
	}
	return usage(fmt.Errorf("--output is table, json or yaml"))
}

// showList writes items as a table, or as {"items": […]}.
func showList[T any](s *session, items []T, columns []column[T]) error {
	s.progress.stop()
	if s.output != "table" {
		return encode(s.env.Stdout, s.output, map[string]any{"items": items})
	}
	return table(s.env.Stdout, items, columns)
}

// show writes one object as a table of one row, or as it is.
func show[T any](s *session, item T, columns []column[T]) error {
	s.progress.stop()
	if s.output != "table" {
		return encode(s.env.Stdout, s.output, item)
	}
	return table(s.env.Stdout, []T{item}, columns)
}

// showAnswer returns a function that shows what an operation of the hub answered.
func showAnswer[T any](s *session, columns []column[T]) func(*http.Response, error) error {
	return func(answer *http.Response, err error) error {
		item, err := client.Read[T](answer, err)
		if err != nil {
			return err
		}
		return show(s, item, columns)
	}
}

// encode writes JSON, or YAML with the same keys.
func encode(w io.Writer, format string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	if format == "yaml" {
		var tree any
		// JSON is YAML. Read as JSON, the numbers would be floats: 1048576 is written as 1.048576e+06.
		if err := yaml.Unmarshal(text, &tree); err != nil {
			return err
		}
		if text, err = yaml.Marshal(tree); err != nil {
			return err
		}
	} else {
		text = append(text, '\n')
	}
	_, err = w.Write(text)
	return err
}

func table[T any](w io.Writer, items []T, columns []column[T]) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	head := make([]string, len(columns))
	for i, c := range columns {
		head[i] = c.name
	}
	fmt.Fprintln(t, strings.Join(head, "\t"))
	for _, item := range items {
		row := make([]string, len(columns))
		for i, c := range columns {
			if row[i] = printable(c.value(item)); row[i] == "" {
				row[i] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(row, "\t"))
	}
	return t.Flush()
}

// printable keeps what others wrote from steering the terminal or breaking the table.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}

// printableLines is printable for a text that may have several lines.
func printableLines(s string) string {
	lines := strings.Split(s, "\n")
	for n := range lines {
		lines[n] = printable(lines[n])
	}
	return strings.Join(lines, "\n")
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

func joined[S ~string](list []S) string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return strings.Join(out, ",")
}
