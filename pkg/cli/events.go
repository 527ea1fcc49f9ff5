package cli

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// streamEventsCommand follows what happens to everything that the caller may see.
func (a *app) streamEventsCommand() *cobra.Command {
	var p client.StreamEventsParams
	c := a.action("events", "What happens to everything that you may see, oldest first", cobra.NoArgs,
		func(ctx context.Context, s *session, _ []string) (err error) {
			if p.ProjectID, _, err = s.billed(ctx, ""); err != nil {
				return err
			}
			s.progress.stop()
			return client.Events(ctx, s.hub, p, s.printEvent, s.editors()...)
		})
	f := c.Flags()
	f.BoolVarP(&p.Follow, "follow", "f", false, "go on as more happens; without --after, from now on")
	f.StringVar(&p.After, "after", "", "`position` of the last event that you have")
	f.StringVar(&p.Type, "type", "", "only this type of event, or those that begin with it, like apps.instance")
	f.StringVar(&p.Subject, "subject", "", "only events of this resource, by id")
	return c
}

// printEvent prints a line for each event: a stream has no end for which a table could wait.
func (s *session) printEvent(e client.Event) error {
	if s.output != "table" {
		text, err := json.Marshal(e)
		if err == nil {
			_, err = fmt.Fprintf(s.env.Stdout, "%s\n", text)
		}
		return err
	}
	line := fmt.Sprintf("%s  %d  %s  %s", stamp(e.Time), e.Pos, e.Type, e.Subject)
	if e.Data.To != "" {
		line += "  " + e.Data.From + " → " + e.Data.To
	}
	if e.Data.Reason != "" {
		line += "  " + e.Data.Reason
	}
	_, err := fmt.Fprintln(s.env.Stdout, printable(line))
	return err
}
