// Package flaghint says more of an unknown flag than that it is unknown. All programs use it.
package flaghint

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Error adds to the error of an unknown flag which flags begin like it, or else how the command is used.
func Error(cmd *cobra.Command, err error) error {
	unknown, is := errors.AsType[*pflag.NotExistError](err)
	if !is {
		return err
	}
	var near []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if name := unknown.GetSpecifiedName(); len(name) > 1 && strings.HasPrefix(f.Name, name) {
			near = append(near, "--"+f.Name)
		}
	})
	if len(near) > 0 {
		return fmt.Errorf("%w; did you mean %s?", err, strings.Join(near, " or "))
	}
	return fmt.Errorf("%w; use: %s", err, cmd.UseLine())
}
