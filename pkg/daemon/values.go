package daemon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// DurationVar adds a flag whose duration must lie between least and most; most 0 is no bound.
func DurationVar(f *pflag.FlagSet, p *time.Duration, name string, value, least, most time.Duration, usage string) {
	*p = value
	f.Var(&duration{p, least, most}, name, usage)
}

type duration struct {
	value       *time.Duration
	least, most time.Duration
}

// String is part of pflag.Value.
func (d *duration) String() string {
	if d.value == nil {
		return ""
	}
	return d.value.String()
}

// Set is part of pflag.Value.
func (d *duration) Set(text string) error {
	v, err := time.ParseDuration(text)
	switch {
	case err != nil:
		return err
	case v < d.least && d.most == 0:
		return fmt.Errorf("must be %s or longer", d.least)
	case v < d.least || d.most > 0 && v > d.most:
		return fmt.Errorf("must be between %s and %s", d.least, d.most)
	}
	*d.value = v
	return nil
}

// Type is part of pflag.Value.
func (*duration) Type() string { return "duration" }

// ChoiceVarP adds a flag that takes one of these texts.
func ChoiceVarP(f *pflag.FlagSet, p *string, name, shorthand, value string, choices []string, usage string) {
	*p = value
	f.VarP(&choice{p, choices}, name, shorthand, usage)
}

type choice struct {
	value   *string
	choices []string
}

// String is part of pflag.Value.
func (c *choice) String() string {
	if c.value == nil {
		return ""
	}
	return *c.value
}

// Set is part of pflag.Value.
func (c *choice) Set(text string) error {
	if !slices.Contains(c.choices, text) {
		return errors.New("must be " + strings.Join(c.choices, " or "))
	}
	*c.value = text
	return nil
}

// Type is part of pflag.Value.
func (*choice) Type() string { return "string" }
