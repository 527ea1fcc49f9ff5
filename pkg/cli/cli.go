// Package cli is the gpuaas command: it turns words into calls of pkg/client and answers into tables, JSON or YAML. It
// knows several hubs, keeps their credentials in one 0600 file, says what it waits for, and ends with a documented exit
// code. It holds no rule of the platform.
package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/flaghint"
)

// Env is everything the command takes from its surroundings.
type Env struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	Getenv func(string) string
	// StderrIsTerminal lets progress rewrite its line.
	StderrIsTerminal bool
	// ReadSecret asks for a secret without showing it; nil without a terminal.
	ReadSecret func(prompt string) (string, error)
	// Terminal makes the terminal raw for a command in a container; nil without a terminal.
	Terminal func() (Terminal, error)
	Version  string
}

// app is one run of the command.
type app struct {
	env Env
	// flags
	configPath, contextName, project, output, key, requestID string
	timeout                                                  time.Duration
}

// Main runs the command and returns its exit code.
func Main(ctx context.Context, env Env, args []string) int {
	a := &app{env: env}
	root := a.root() //nolint:contextcheck // cobra hands the context to each command itself
	root.SetArgs(args)
	root.SetIn(env.Stdin)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	err := root.ExecuteContext(ctx)
	if _, ended := errors.AsType[commandExit](err); err != nil && !ended {
		fmt.Fprintln(env.Stderr, "gpuaas: "+printableLines(describe(err)))
	}
	return exitCode(err)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Args:  cobra.ArbitraryArgs,
		RunE:  helpOrUnknown,
		Use:   "gpuaas",
		Short: "Run apps on a mesh of GPU nodes",
		Long: `Run apps on a mesh of GPU nodes.

Start with "gpuaas login". Credentials of all hubs are in ` + "`~/.config/gpuaas/config.yaml`" +
			` (mode 0600; GPUAAS_CONFIG moves it).
Without a file, GPUAAS_URL, GPUAAS_CA_FILE and GPUAAS_TOKEN or GPUAAS_TOKEN_FILE do the same for one hub.`,
		Version:           a.env.Version,
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		PersistentPreRunE: func(c *cobra.Command, _ []string) error {
			// Cobra checks this too, after this function, and without our exit code.
			return cmp.Or(checkOutput(a.output), checkTimeout(a.timeout), usage(c.ValidateRequiredFlags()))
		},
	}
	f := root.PersistentFlags()
	f.StringVar(&a.configPath, "config", a.getenv("GPUAAS_CONFIG"), "file with contexts and credentials (GPUAAS_CONFIG)")
	f.StringVar(&a.contextName, "context", a.getenv("GPUAAS_CONTEXT"), "context to use instead of the current one "+
		"(GPUAAS_CONTEXT)")
	f.StringVarP(&a.project, "project", "p", a.getenv("GPUAAS_PROJECT"), "project, by id or slug (GPUAAS_PROJECT)")
	f.StringVarP(&a.output, "output", "o", "table", "table, json or yaml")
	f.StringVar(&a.key, "idempotency-key", "", "makes repeating this very command harmless")
	f.StringVar(&a.requestID, "request-id", "", "correlation id of the request")
	f.DurationVar(&a.timeout, "timeout", 0, "give up after this time; 0 waits as long as it takes")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return usage(flaghint.Error(c, err)) })
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json", "yaml"},
		cobra.ShellCompDirectiveNoFileComp))
	_ = root.RegisterFlagCompletionFunc("context", a.completeContexts)
	root.AddCommand(
		a.loginCommand(), a.logoutCommand(), a.passwordCommand(), a.sessionsCommand(),
		a.invitationsCommand(), a.contextCommand(),
		a.whoamiCommand(), a.authCommand(),
		a.appsCommand(), a.projectsCommand(), a.serviceAccountsCommand(), a.skusCommand(), a.allocationsCommand(),
		a.volumesCommand(),
		a.instancesCommand(), a.attachmentsCommand(),
		a.portForwardCommand(), a.execCommand(), a.copyCommand(), a.logsCommand(),
		a.nodesCommand(), a.recoveryCommand(), a.usageCommand(), a.ledgerCommand(), a.walletCommand(), a.auditCommand(),
		a.streamEventsCommand(), a.webhooksCommand(),
		a.orgsCommand(), a.usersCommand(), a.tokensCommand(), a.rolesCommand(), a.joinTokensCommand(), a.pricesCommand(),
		a.creditsCommand(), a.publishersCommand(),
		a.manifestsCommand(), a.versionsCommand(), a.entitlementsCommand(), a.environmentsCommand(), a.secretsCommand(),
		a.accessCredentialsCommand(),
		a.artifactsCommand(),
		exitCodesTopic(),
	)
	return root
}

func (a *app) getenv(name string) string { return a.env.Getenv(name) }

// group is a command that only holds others.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{
		Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: helpOrUnknown,
	}
	c.AddCommand(commands...)
	return c
}

func helpOrUnknown(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	text := fmt.Sprintf("there is no command %q; %s --help lists them", strings.TrimSpace(cmd.CommandPath()+" "+args[0]),
		cmd.CommandPath())
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return usage(errors.New(text))
}

// action is a leaf: it opens the session, keeps people informed, and bounds the time.
func (a *app) action(use, short string, args cobra.PositionalArgs, run func(ctx context.Context, s *session,
	args []string) error,
) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short,
		Args: checked(args),
		RunE: func(cmd *cobra.Command, given []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			p := newProgress(a.env.Stderr, a.env.StderrIsTerminal, strings.ToLower(cmd.Short[:1])+cmd.Short[1:])
			defer p.stop()
			s, err := a.open(p)
			if err != nil {
				return err
			}
			defer s.hub.Close()
			return run(ctx, s, given)
		},
	}
}

func checkTimeout(d time.Duration) error {
	if d < 0 {
		return usage(errors.New("--timeout is a time span like 30s, or 0"))
	}
	return nil
}

// bounded ends with --timeout.
func (a *app) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.timeout > 0 {
		return context.WithTimeout(ctx, a.timeout)
	}
	return context.WithCancel(ctx)
}

// checked turns a wrong number of arguments into an error that shows the right use.
func checked(args cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, given []string) error {
		if err := args(cmd, given); err != nil {
			return usage(fmt.Errorf("%w; use: %s", err, cmd.UseLine()))
		}
		return nil
	}
}

// listing is a leaf that shows every page of a list.
func listing[T any](a *app, use, short string, args cobra.PositionalArgs, columns []column[T],
	page func(ctx context.Context, s *session, args []string, cursor string) (*http.Response, error),
) *cobra.Command {
	return a.action(use, short, args, func(ctx context.Context, s *session, given []string) error {
		items := []T{}
		all := client.All[T](func(cursor string) (*http.Response, error) { return page(ctx, s, given, cursor) })
		for item, err := range all {
			if err != nil {
				return err
			}
			items = append(items, item)
		}
		return showList(s, items, columns)
	})
}

// projectAction is an action on the project of --project or of the context.
func (a *app) projectAction(use, short string, args cobra.PositionalArgs, run func(ctx context.Context, s *session,
	project string, args []string) error,
) *cobra.Command {
	return a.action(use, short, args, func(ctx context.Context, s *session, given []string) error {
		project, err := s.projectID(ctx)
		if err != nil {
			return err
		}
		return run(ctx, s, project, given)
	})
}

// projectListing is a listing in the project of --project or of the context.
func projectListing[T any](a *app, use, short string, args cobra.PositionalArgs, columns []column[T],
	page func(ctx context.Context, s *session, project string, args []string, cursor string) (*http.Response, error),
) *cobra.Command {
	return listing(a, use, short, args, columns, func(ctx context.Context, s *session, given []string, cursor string,
	) (*http.Response, error) {
		project, err := s.projectID(ctx)
		if err != nil {
			return nil, err
		}
		return page(ctx, s, project, given, cursor)
	})
}

// session is a connection to the hub with a credential.
type session struct {
	*app
	hub      *client.Hub
	conf     client.Config
	context  hubContext
	progress *progress
}

// editors carry the flags that belong to the request itself.
func (s *session) editors() []client.RequestEditorFn {
	var out []client.RequestEditorFn
	if s.key != "" {
		out = append(out, client.WithIdempotencyKey(s.key))
	}
	if s.requestID != "" {
		out = append(out, client.WithRequestID(s.requestID))
	}
	return out
}

// open finds out which hub and who, and connects.
func (a *app) open(p *progress) (*session, error) {
	c, err := a.currentContext()
	if err != nil {
		return nil, err
	}
	conf := client.Config{
		URL: c.URL, CAPEM: []byte(c.CAPEM), UserAgent: "gpuaas/" + a.env.Version,
		OnRetry: func(attempt int, wait time.Duration, cause error) {
			p.note(fmt.Sprintf("the hub did not answer (attempt %d), next in %s: %s", attempt, wait.Round(100*time.Millisecond),
				firstLine(cause)))
		},
	}
	if c.Login != nil {
		conf.Credential = &loginCredential{path: a.storePath(), context: c.name, conf: conf}
	} else if conf.Credential, err = c.credential(conf); err != nil {
		return nil, err
	}
	hub, err := client.Open(conf)
	if err != nil {
		return nil, usage(err)
	}
	return &session{app: a, hub: hub, conf: conf, context: c, progress: p}, nil
}

// currentContext is the one of the flags, of the file, or of the environment.
func (a *app) currentContext() (hubContext, error) {
	if url := a.getenv("GPUAAS_URL"); url != "" && a.contextName == "" {
		return a.environmentContext(url)
	}
	store, err := loadStore(a.storePath())
	if err != nil {
		return hubContext{}, err
	}
	name := a.contextName
	if name == "" {
		name = store.CurrentContext
	}
	if name == "" {
		return hubContext{}, usage(errors.New("no hub yet; log in with: gpuaas login --url https://HOST:PORT --ca-file " +
			"CA.pem --token-file FILE"))
	}
	c, ok := store.Contexts[name]
	if !ok {
		return hubContext{}, usage(fmt.Errorf("there is no context %q; gpuaas context list shows them", name))
	}
	c.name = name
	return c, nil
}

func (a *app) environmentContext(url string) (hubContext, error) {
	c := hubContext{URL: url, Token: a.getenv("GPUAAS_TOKEN")}
	if path := a.getenv("GPUAAS_CA_FILE"); path != "" {
		var err error
		if c.CAPEM, err = readAuthority(path); err != nil {
			return c, usage(fmt.Errorf("GPUAAS_CA_FILE: %w", err))
		}
	}
	if path := a.getenv("GPUAAS_TOKEN_FILE"); path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return c, usage(fmt.Errorf("GPUAAS_TOKEN_FILE: %w", err))
		}
		c.Token = strings.TrimSpace(string(text))
	}
	return c, nil
}

// readAuthority reads a file with the hub's authority. An empty file does not mean the system's authorities.
func readAuthority(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err == nil && len(bytes.TrimSpace(text)) == 0 {
		err = fmt.Errorf("%s holds no certificate", path)
	}
	return string(text), err
}

func (a *app) storePath() string {
	if a.configPath != "" {
		return a.configPath
	}
	base := a.getenv("XDG_CONFIG_HOME")
	if base == "" {
		base = filepath.Join(a.getenv("HOME"), ".config")
	}
	return filepath.Join(base, "gpuaas", "config.yaml")
}

func firstLine(err error) string {
	if err == nil {
		return ""
	}
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
