package reference

import (
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// configurationPage has the flags of the commands that configure a daemon.
const configurationPage = "configuration.md"

// Commands renders a program: a table of its commands, and for each how it is used, what it does and its flags. The
// flags of the configured commands are on the page configuration.md.
func Commands(root *cobra.Command, configured ...string) string {
	var rows [][]string
	var sections strings.Builder
	visit(root, func(c *cobra.Command) {
		if len(c.Commands()) > 0 && c != root && !c.LocalNonPersistentFlags().HasFlags() {
			return // it only holds others
		}
		if c != root {
			rows = append(rows, []string{"[" + Code(c.CommandPath()) + "](#" + anchor(c.CommandPath()) + ")", Text(c.Short)})
			fmt.Fprintf(&sections, "\n### %s\n\n", c.CommandPath())
		}
		describe(&sections, c, configured)
	})
	about, rest, _ := strings.Cut(sections.String(), "\n### ")
	return about + "\n" + Table([]string{"command", "does"}, rows) + "\n### " + rest
}

func visit(c *cobra.Command, f func(*cobra.Command)) {
	f(c)
	for _, sub := range c.Commands() {
		if !sub.Hidden {
			visit(sub, f)
		}
	}
}

func describe(w *strings.Builder, c *cobra.Command, configured []string) {
	about := c.Long
	if about == "" {
		about = c.Short
	}
	if c.Runnable() && c.HasParent() {
		fmt.Fprintf(w, "    %s\n\n", c.UseLine())
	}
	w.WriteString(wrap(Sentence(about)) + "\n")
	if c.Example != "" {
		fmt.Fprintf(w, "\nExample:\n\n%s\n", indent(c.Example))
	}
	for _, name := range configured {
		if name == c.CommandPath() {
			fmt.Fprintf(w, "\nFlags: [%s](%s#%s).\n", configurationPage, configurationPage, anchor(name))
			return
		}
	}
	var rows [][]string
	add := func(f *pflag.Flag) {
		if !f.Hidden {
			value, meaning := usage(f)
			rows = append(rows, []string{name(f), value, meaning})
		}
	}
	c.LocalFlags().VisitAll(add)
	// The flags of a group that is shown by its commands only; those of the program are in its own section.
	c.InheritedFlags().VisitAll(func(f *pflag.Flag) {
		if c.Root().PersistentFlags().Lookup(f.Name) == nil {
			add(f)
		}
	})
	if len(rows) > 0 {
		w.WriteString("\n" + Table([]string{"flag", "default", "meaning"}, rows))
	}
}

// Flags renders the flags of a command, each with the environment variable that can give it.
func Flags(c *cobra.Command, envPrefix string) string {
	var rows [][]string
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		value, meaning := usage(f)
		variable := envPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		rows = append(rows, []string{name(f), Code(variable), value, meaning})
	})
	return Table([]string{"flag", "environment variable", "default", "meaning"}, rows)
}

func name(f *pflag.Flag) string {
	if f.Shorthand != "" {
		return Code("-"+f.Shorthand) + ", " + Code("--"+f.Name)
	}
	return Code("--" + f.Name)
}

// usage splits what a flag says about itself: a default that depends on something stands at the end of its text, in
// parentheses.
func usage(f *pflag.Flag) (value, meaning string) {
	meaning = f.Usage
	if m := regexp.MustCompile(`^(.*?) \((?:([^()]*); )?default:? (.*)\)$`).FindStringSubmatch(meaning); m != nil {
		meaning, value = m[1], Text(m[3])
		if m[2] != "" {
			meaning += " (" + m[2] + ")"
		}
	}
	if len(f.Annotations[cobra.BashCompOneRequiredFlag]) > 0 {
		value = "required"
	}
	if strings.HasPrefix(f.Value.Type(), "string") && f.Value.Type() != "string" && !strings.Contains(meaning, "repeat") {
		meaning += " (repeatable)"
	}
	if value == "" {
		value = literal(f)
	}
	return value, Text(meaning)
}

// literal is the default of a flag in the form that a person would give it.
func literal(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "bool":
		return map[string]string{"true": "on", "false": "off"}[f.DefValue]
	case "duration":
		d, err := time.ParseDuration(f.DefValue)
		if err != nil || d == 0 {
			return Code(strings.TrimSuffix(f.DefValue, "s"))
		}
		text := regexp.MustCompile(`([a-z])0[ms](0s)?$`).ReplaceAllString(d.String(), "$1")
		if days := d.Hours() / 24; days > 2 && days == float64(int(days)) {
			return fmt.Sprintf("%s (%d d)", Code(text), int(days))
		}
		return Code(text)
	}
	text := strings.Trim(f.DefValue, "[]")
	if text == "" {
		return ""
	}
	return Code(text)
}

// anchor is the name that Markdown gives to a heading.
func anchor(heading string) string {
	return strings.ReplaceAll(strings.ToLower(heading), " ", "-")
}

// maxColumns bounds the lines of prose.
const maxColumns = 120

// wrap breaks the paragraphs of prose anew; indented lines stay as they are.
func wrap(text string) string {
	paragraphs := strings.Split(text, "\n\n")
	for i, p := range paragraphs {
		if strings.HasPrefix(p, "    ") {
			continue
		}
		var b strings.Builder
		column := 0
		for word := range strings.FieldsSeq(p) {
			length := utf8.RuneCountInString(word)
			switch {
			case column == 0:
			case column+1+length > maxColumns:
				b.WriteByte('\n')
				column = 0
			default:
				b.WriteByte(' ')
				column++
			}
			b.WriteString(word)
			column += length
		}
		paragraphs[i] = b.String()
	}
	return strings.Join(paragraphs, "\n\n")
}

func indent(text string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.Trim(text, "\n")) {
		b.WriteString("    " + strings.TrimLeft(line, " "))
	}
	return b.String()
}
